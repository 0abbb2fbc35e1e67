"""The page's files as they are served: headers, types, who may have them; and its figures."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from martlet.server.page import FOLDER

from .scripted_engine import ScriptedEngine, byte_tokenizer, says
from .serving import assert_refused, chat_body, serving, wait_until

FILES = sorted(path.name for path in FOLDER.iterdir())
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine()) as client:
        yield client


@pytest.mark.parametrize("name", ["", *FILES])
def test_files_have_their_type_and_a_strict_policy(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/static/{name}" if name else "/")
    assert answer.status_code == 200
    kind = KINDS[name.rpartition(".")[2] or "html"]
    assert answer.headers["content-type"].startswith(kind)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.head(str(answer.url)).status_code == 200


@pytest.mark.parametrize("path", ["/static/", "/static/page.py", "/static/..%2fpage.py"])
def test_nothing_else_is_served(client: httpx.Client, path: str) -> None:
    assert_refused(client.get(path), 404)


def test_the_page_loads_only_what_is_here(client: httpx.Client) -> None:
    page = client.get("/").text
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert len(parts) >= 5
    for part in parts:
        assert client.get(f"/{part}").status_code == 200
    assert "<script>" not in page
    assert "style=" not in page
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert name in FILES
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_page_needs_no_key_but_its_figures_do() -> None:
    with serving(ScriptedEngine(), api_keys=("k",)) as client:
        assert client.get("/").status_code == 200
        assert client.get("/static/app.js").status_code == 200
        assert_refused(client.get("/stats"), 401)
        assert_refused(client.post("/", json={}), 401)
        assert client.get("/stats", headers={"x-api-key": "k"}).status_code == 200


def test_page_is_not_for_rebound_names(client: httpx.Client) -> None:
    """B120: a page from elsewhere that got our address under its own name."""
    assert_refused(client.get("/", headers={"host": "evil.example"}), 403)


NOTHING = {"p50": None, "p95": None, "p99": None}


def test_stats_tell_what_goes_on() -> None:
    engine = ScriptedEngine(says("", end=False), token_s=0.01, slots=1)
    with serving(engine, grace_s=0.01) as client:
        before = client.get("/stats").json()
        assert before.pop("resident_bytes") > 1 << 20
        assert before == {
            "model": "tiny",
            "context": 4096,
            "has_chat_template": True,
            "state": "ready",
            "running": 0,
            "waiting": 0,
            "kv_blocks": {"total": 8, "used": 0, "cached": 0},
            "prompt_tokens": {"computed": 0, "cached": 0},
            "steps": 0,
            "rows": 0,
            "last_step": None,
            "recent": {"n": 0, "ttft_ms": NOTHING, "tpot_ms": NOTHING},
        }
        body = chat_body(stream=True)
        path = "/v1/chat/completions"
        with client.stream("POST", path, json=body), client.stream("POST", path, json=body):
            wait_until(lambda: engine.stats().running == 1)
            now = client.get("/stats").json()
        assert (now["running"], now["waiting"], now["kv_blocks"]["used"]) == (1, 1, 1)


def test_stats_of_a_base_model() -> None:
    engine = ScriptedEngine(tokenizer=byte_tokenizer(template=None))
    with serving(engine) as client:
        assert client.get("/stats").json()["has_chat_template"] is False
