"""The sides of a load: servers that run, servers started for it, and an engine of our own.
Owns starting and stopping them and what is known of each; must not know workloads or figures."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from martlet.quant.errors import MartletError
from martlet.runtime.machine import choose_threads
from martlet.scripts.conditions import file_conditions, martlet_versions
from martlet.scripts.generate import open_engine, open_model
from martlet.scripts.load_http import HttpError
from martlet.scripts.load_targets import DirectTarget, Endpoint, HttpTarget, Target
from martlet.scripts.once import running_server

START_S = 120.0
LOOK_EVERY_S = 0.2


class SideError(MartletError):
    """A side that cannot be had."""


@dataclass(frozen=True)
class Manner:
    """How every side is asked, and what is said of all of them."""

    endpoint: Endpoint = "completions"
    is_stream: bool = True
    name: str | None = None
    """Of the model, in requests; None: the first that the server lists."""
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    kv_type: str = "f16"
    file: Path | None = None
    """What a running server serves, if the caller says so."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Conditions that nobody can read: the caller's word."""
    speculate: str = "off"
    context: int | None = None

    @property
    def n_threads(self) -> int:
        return choose_threads(self.threads).count

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True)
class Side:
    label: str
    target: Target
    conditions: Mapping[str, Any]


@contextlib.asynccontextmanager
async def open_url(url: str, label: str | None, manner: Manner) -> AsyncIterator[Side]:
    """A server that runs already: what it does not tell is not known."""
    url = url.rstrip("/").removesuffix("/v1")
    target = await _target(url, manner)
    try:
        facts = await server_facts(target)
        found = {"transport": "http", **facts, **_of_path(manner.file), **manner.notes}
        yield Side(label or str(facts.get("engine", url.partition("://")[2])), target, found)
    finally:
        await target.close()


@contextlib.asynccontextmanager
async def open_served(model: str, path: Path, manner: Manner) -> AsyncIterator[Side]:
    """`martlet serve`, for as long as this lasts."""
    options = [*_serve_options(manner), "--ping-seconds", "0"]
    with running_server(model, options) as url:
        target = await _target(url.split("/v1/")[0], manner)
        try:
            found = {**_martlet(path, manner), "transport": "http", "flags": shlex.join(options)}
            yield Side("martlet", target, {**found, **manner.notes})
        finally:
            await target.close()


def _serve_options(manner: Manner) -> list[str]:
    options = ["--threads", str(manner.n_threads), "--kv-type", manner.kv_type]
    options += ["--speculate", manner.speculate]
    return [*options, "--context", str(manner.context)] if manner.context else options


@contextlib.asynccontextmanager
async def open_direct(model: str, path: Path, manner: Manner) -> AsyncIterator[Side]:
    """An engine in this process, without HTTP; it asks as fast as a server's own code could."""
    load = {"threads": manner.n_threads, "kv_type": manner.kv_type, "context": manner.context}
    with open_model(model, **load) as opened, open_engine(opened, manner.speculate) as engine:
        found = {**_martlet(path, manner), "transport": "direct"}
        found["flags"] = shlex.join(_serve_options(manner))
        yield Side(
            "martlet, direct", DirectTarget(engine, opened.tokenizer), {**found, **manner.notes}
        )


@contextlib.asynccontextmanager
async def open_command(
    label: str, command: str, path: Path | None, n_streams: int, manner: Manner
) -> AsyncIterator[Side]:
    """Another server: {model}, {port}, {threads} and {streams} of the command are filled in."""
    port = _free_port()
    places: dict[str, Any] = {"port": port, "threads": manner.n_threads, "streams": n_streams}
    if path:
        places["model"] = str(path)
    try:
        words = [word.format(**places) for word in shlex.split(command)]
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in places)
        raise SideError(f"--run {label}: {error} in the command; there are {known}") from None
    with _running(label, words) as child:
        target = await _when_ready(f"http://127.0.0.1:{port}", label, child, manner)
        try:
            facts = await server_facts(target)
            # The whole command is a condition; where things are on this machine is not.
            flags = shlex.join(Path(word).name if "/" in word else word for word in words)
            found: dict[str, Any] = {"transport": "http", "kv_type": manner.kv_type, **facts}
            if "{threads}" in command:
                found["threads"] = manner.n_threads
            found |= {"flags": flags.replace(str(port), "PORT"), **_of_path(path), **manner.notes}
            yield Side(label, target, found)
        finally:
            await target.close()


@contextlib.contextmanager
def _running(label: str, words: list[str]) -> Any:
    try:
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise SideError(f"--run {label}: {error}") from None
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def _when_ready(
    url: str, label: str, child: subprocess.Popen[bytes], manner: Manner
) -> HttpTarget:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if child.poll() is not None:
            raise SideError(f"--run {label}: it ended with code {child.returncode} at its start")
        with contextlib.suppress(OSError, HttpError, SideError):
            target = await _target(url, manner)
            if await target.get("/health") is not None:
                return target
        await asyncio.sleep(LOOK_EVERY_S)
    raise SideError(f"--run {label}: not ready after {START_S:g} s")


async def _target(url: str, manner: Manner) -> HttpTarget:
    target = HttpTarget(
        url, manner.name or "", manner.endpoint, manner.is_stream, manner.extra, manner.headers
    )
    if not manner.name:
        try:
            listed = await target.get("/v1/models")
        except OSError as error:
            raise SideError(f"{url} does not answer: {error}") from None
        data = listed.get("data") if isinstance(listed, dict) else None
        if not data:
            raise SideError(f"{url}/v1/models lists no model; say which with --name")
        target.model = str(data[0]["id"])
    return target


async def server_facts(target: HttpTarget) -> dict[str, Any]:
    """What the kinds of servers say of themselves, each in its own place."""
    stats = await target.get("/stats")
    if isinstance(stats, dict) and "kv_blocks" in stats:
        return {"engine": "martlet", "context": stats.get("context")}
    props = await target.get("/props")
    if isinstance(props, dict) and "build_info" in props:
        found = {"engine": "llama.cpp", "versions": str(props["build_info"])}
        return {**found, "context": (props.get("default_generation_settings") or {}).get("n_ctx")}
    for path, engine in (("/api/version", "ollama"), ("/version", "vllm")):
        page = await target.get(path)
        if isinstance(page, dict) and "version" in page:
            return {"engine": engine, "versions": str(page["version"])}
    return {}


def _martlet(path: Path, manner: Manner) -> dict[str, Any]:
    found = {"engine": "martlet", **martlet_versions(), **_of_path(path)}
    return {**found, "threads": manner.n_threads, "kv_type": manner.kv_type}


def _of_path(path: Path | None) -> dict[str, Any]:
    return file_conditions(path) if path else {}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
