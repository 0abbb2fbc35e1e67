"""Several models behind one server: which answers, when each is loaded, what makes room."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from martlet.runtime.errors import ModelError, NotEnoughMemory
from martlet.server.app import create_app
from martlet.server.facts import ModelFacts
from martlet.server.lifecycle import Lifecycle
from martlet.server.options import ServerOptions
from martlet.server.shelf import Loaded, Place, Shelf
from martlet.server.switch import create_shelf_app
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from .scripted_engine import ScriptedEngine, says
from .serving import assert_refused, running_app, wait_until

PATH = "/v1/chat/completions"


class Models:
    """Three models that say their names; remembers what was loaded and closed."""

    def __init__(self, *, load_s: float = 0.0, **engine_options: Any) -> None:
        self.loads: Counter[str] = Counter()
        self.open: set[str] = set()
        self.engines: dict[str, ScriptedEngine] = {}
        self.load_s, self.engine_options = load_s, engine_options

    def place(self, name: str, need_bytes: int = 10) -> Place:
        def load(lifecycle: Lifecycle) -> Loaded:
            time.sleep(self.load_s)
            self.loads[name] += 1
            self.open.add(name)
            engine = ScriptedEngine(says(f"I am {name}"), **self.engine_options)
            self.engines[name] = engine
            app = create_app(
                engine, engine.tokenizer, model_name=name, context=4096, lifecycle=lifecycle
            )
            return Loaded(app, app.state.service, lambda: self.open.discard(name))

        return Place(name, need_bytes, ModelFacts(n_bytes=need_bytes), load)


@contextlib.contextmanager
def serving(
    models: Models, *, options: dict[str, Any] | None = None, **kept: Any
) -> Iterator[httpx.Client]:
    shelf = Shelf([models.place("a"), models.place("b"), models.place("c", 15)], **kept)
    app = create_shelf_app(shelf, ServerOptions(**(options or {})))
    with running_app(app) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        yield client


def ask(client: httpx.Client, model: str | None, **fields: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    body = {**named, "messages": [{"role": "user", "content": "hi"}], **fields}
    return client.post(PATH, json=body)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found


def test_each_request_goes_to_the_model_it_names() -> None:
    models = Models()
    with serving(models) as client:
        assert not models.loads
        assert text(ask(client, "b")) == "I am b"
        assert models.open == {"b"}
        assert text(ask(client, None)) == "I am a"
        assert text(ask(client, "b:latest")) == "I am b"
        assert models.loads == {"a": 1, "b": 1}
        error = assert_refused(ask(client, "d"), 404)
        assert error["code"] == "model_not_found"
        assert "a, b, c" in error["message"]
        assert_refused(client.post(PATH, content="{", headers={"content-type": "application/json"}))


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "./a", "a.gguf", "a/../a", "A", "a\x00"])
def test_a_name_is_looked_up_and_never_a_path(name: str) -> None:
    models = Models()
    with serving(models) as client:
        assert_refused(ask(client, name), 404)
        assert client.get("/stats", params={"model": name}).status_code == 404
    assert not models.loads


def test_all_dialects_pick_their_model() -> None:
    with serving(Models()) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        anthropic = client.post("/v1/messages", json={**body, "model": "b"}).json()
        assert anthropic["content"][0]["text"] == "I am b"
        ollama = {"model": "c", "prompt": "hi", "stream": False}
        assert client.post("/api/generate", json=ollama).json()["response"] == "I am c"
        official = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        chunks = official.completions.create(model="a", prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "I am a"


def test_a_shelf_has_the_routes_of_its_models() -> None:
    def routes(app: FastAPI) -> set[tuple[str, str]]:
        each = [route for route in app.routes if isinstance(route, Route)]
        return {(route.path, method) for route in each for method in route.methods or ()}

    models = Models()
    place = models.place("a")
    missing = routes(place.load(Lifecycle()).app) - routes(
        create_shelf_app(Shelf([place]), ServerOptions())
    )
    assert not missing


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/favicon.ico", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", PATH, 405),
        ("GET", "/api/version", 200),
        ("POST", "/api/pull", 400),
    ],
)
def test_what_needs_no_model_loads_none(method: str, path: str, status: int) -> None:
    models = Models()
    with serving(models) as client:
        assert client.request(method, path, json={}).status_code == status
        assert not models.loads
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        assert 400 <= client.get(path, headers=upgrade | key).status_code < 500
        assert not models.loads


def test_lists_tell_all_models_and_which_are_loaded() -> None:
    with serving(Models()) as client:
        ask(client, "b")
        listed = client.get("/v1/models").json()["data"]
        states = {model["id"]: model["status"]["value"] for model in listed}
        assert states == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert client.get("/v1/models/c").json()["id"] == "c"
        assert_refused(client.get("/v1/models/d"), 404)
        names = [model["name"] for model in client.get("/api/tags").json()["models"]]
        assert names == ["a", "b", "c"]
        assert [model["name"] for model in client.get("/api/ps").json()["models"]] == ["b"]
        assert client.get("/stats", params={"model": "b"}).json()["state"] == "ready"
        assert client.get("/stats").json()["state"] == "unloaded"
        assert client.get("/ready").status_code == 200
        assert client.get("/").headers["content-type"].startswith("text/html")


def test_metrics_of_all_loaded_models_are_one_page() -> None:
    with serving(Models()) as client:
        for model in ("a", "b", "b"):
            ask(client, model)
        families = list(text_string_to_metric_families(client.get("/metrics").text))
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        counts = {
            sample.labels["model_name"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "martlet_requests_total" and sample.labels["reason"] == "stop"
        }
        assert counts == {"a": 1, "b": 2}


def test_an_idle_model_goes_after_its_time_and_comes_back() -> None:
    models = Models()
    with serving(models, keep_alive_s=0.2) as client:
        ask(client, "a")
        assert models.open == {"a"}
        wait_until(lambda: not models.open)
        assert text(ask(client, "a")) == "I am a"
        assert models.loads["a"] == 2


def test_nothing_of_a_model_stays_when_it_goes() -> None:
    services = []
    models = Models()
    place = models.place("a")
    works = place.load

    def remembers(lifecycle: Lifecycle) -> Loaded:
        loaded = works(lifecycle)
        services.append(weakref.ref(loaded.service))
        return loaded

    place.load = remembers
    app = create_shelf_app(Shelf([place]), ServerOptions())
    with running_app(app) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for _ in range(2):
            assert text(ask(client, "a")) == "I am a"
            client.post("/api/generate", json={"model": "a", "keep_alive": 0})
            wait_until(lambda: not models.open)
            wait_until(lambda: services[-1]() is None)
    assert len(services) == 2


def test_a_busy_model_stays() -> None:
    models = Models(token_s=0.1)
    with serving(models, keep_alive_s=0.0) as client:
        assert text(ask(client, "a")) == "I am a"  # takes longer than it would be kept
        wait_until(lambda: not models.open)
        assert models.loads["a"] == 1


def test_the_longest_idle_model_makes_room() -> None:
    models = Models()
    with serving(models, max_bytes=25) as client:
        for model in ("a", "b", "a"):
            ask(client, model)
        assert models.open == {"a", "b"}
        ask(client, "c")  # takes 15 bytes: b must go, a may stay
        assert models.open == {"a", "c"}
        ask(client, "b")
        assert models.open == {"b", "c"}


def test_an_idle_model_goes_where_the_system_has_no_memory_for_another() -> None:
    models = Models()
    places = [models.place("a"), models.place("b")]
    works = places[1].load

    def needs_room(lifecycle: Lifecycle) -> Loaded:
        if models.open:
            raise NotEnoughMemory("9 bytes are needed", needed_bytes=9, available_bytes=5)
        return works(lifecycle)

    places[1].load = needs_room
    app = create_shelf_app(Shelf(places), ServerOptions())
    with running_app(app) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        assert text(ask(client, "a")) == "I am a"
        assert text(ask(client, "b")) == "I am b"
        assert models.open == {"b"}
        client.post("/api/generate", json={"model": "b", "keep_alive": 0})
        wait_until(lambda: not models.open)
        assert text(ask(client, "a")) == "I am a"
        models.engines["a"].unpaused.clear()
        with ThreadPoolExecutor() as pool:
            busy = pool.submit(ask, client, "a")
            wait_until(lambda: models.engines["a"].n_unfinished == 1)
            assert "9 bytes" in assert_refused(ask(client, "b"), 503)["message"]
            models.engines["a"].unpaused.set()
            assert text(busy.result()) == "I am a"


def test_no_room_beside_busy_models() -> None:
    models = Models()
    with serving(models, max_bytes=20) as client, ThreadPoolExecutor() as pool:
        ask(client, "a")
        models.engines["a"].unpaused.clear()
        busy = pool.submit(ask, client, "a")
        wait_until(lambda: models.engines["a"].n_unfinished == 1)
        refusal = ask(client, "c")
        assert assert_refused(refusal, 503)["code"] == "model_memory_full"
        assert int(refusal.headers["retry-after"]) > 0
        assert models.open == {"a"}
        assert text(ask(client, "b")) == "I am b"
        models.engines["a"].unpaused.set()
        assert text(busy.result()) == "I am a"
        assert text(ask(client, "c")) == "I am c"


def test_a_model_larger_than_all_memory_is_refused_with_both_numbers() -> None:
    models = Models()
    with serving(models, max_bytes=12) as client:
        ask(client, "a")
        error = assert_refused(ask(client, "c"), 400)
        assert error["code"] == "model_too_large"
        assert "15" in error["message"]
        assert "12" in error["message"]
        assert models.open == {"a"}  # nothing went for it


def test_many_requests_load_a_model_once_and_others_do_not_wait() -> None:
    models = Models()
    with serving(models) as client, ThreadPoolExecutor() as pool:
        ask(client, "a")
        models.load_s = 0.5
        waiting = [pool.submit(ask, client, "b") for _ in range(4)]
        time.sleep(0.1)
        assert text(ask(client, "a")) == "I am a"
        assert "b" not in models.open
        assert [text(each.result()) for each in waiting] == ["I am b"] * 4
        assert models.loads["b"] == 1


def test_a_model_that_does_not_load_is_an_error_in_words() -> None:
    models = Models()
    place = models.place("a")
    works = place.load

    def fails(lifecycle: Lifecycle) -> Loaded:
        raise ModelError("tensor x is missing")

    place.load = fails
    app = create_shelf_app(Shelf([place]), ServerOptions())
    with running_app(app) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        assert "tensor x" in assert_refused(ask(client, "a"), 500)["message"]
        place.load = works
        assert text(ask(client, "a")) == "I am a"


def test_a_model_whose_engine_has_ended_is_loaded_again() -> None:
    models = Models()
    with serving(models) as client:
        assert text(ask(client, "a")) == "I am a"
        models.engines["a"].is_alive = False
        assert client.get("/health").status_code == 503
        assert text(ask(client, "a")) == "I am a"
        assert client.get("/health").status_code == 200
        assert models.loads["a"] == 2


@pytest.mark.parametrize("path", [PATH, "/api/chat", "/v1/models"])
def test_the_doors_are_those_of_the_whole_server(path: str) -> None:
    models = Models()
    records: list[dict[str, Any]] = []
    with serving(models, options={"api_keys": ("k",), "log": records.append}) as client:
        assert client.post(path, json={"model": "a"}).status_code == 401
        assert not models.loads
        headers = {"x-api-key": "k", "x-request-id": "r-7"}
        body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
        answer = client.post(PATH, json=body, headers=headers)
        assert answer.headers["x-request-id"] == "r-7"
        wait_until(lambda: len(records) == 2)
        assert records[1]["request_id"] == "r-7"
        assert records[1]["output_tokens"] == 7


def test_leaving_ends_the_request() -> None:
    models = Models(token_s=0.05)
    with serving(models) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with client.stream("POST", PATH, json=body) as answer:
            next(answer.iter_lines())
        wait_until(lambda: models.engines["a"].requests[0].reason == "cancelled")
