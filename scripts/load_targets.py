"""Who is asked: a server over HTTP, or an engine in this process, with the same questions.
Owns how a question is put and how an answer becomes a Heard; must not know workloads or reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from martlet.runtime.events import FinishEvent, TokenEvent
from martlet.scripts.load_http import Connections
from martlet.scripts.load_stream import Heard, read_stream, read_whole

if TYPE_CHECKING:
    from martlet.runtime.engine import Engine
    from martlet.runtime.events import Event
    from martlet.runtime.tokenizer import Tokenizer

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KV_SERIES = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class Question:
    """The last text, and what was said before it: (asked, answered) each."""

    text: str
    max_tokens: int
    said: tuple[tuple[str, str], ...] = ()

    @property
    def whole_text(self) -> str:
        return "".join(asked + answered for asked, answered in self.said) + self.text

    @property
    def messages(self) -> list[dict[str, str]]:
        found = []
        for asked, answered in self.said:
            found.append({"role": "user", "content": asked})
            found.append({"role": "assistant", "content": answered})
        return [*found, {"role": "user", "content": self.text}]


class Answer(Protocol):
    """What came back, unread: reading waits until it disturbs nobody."""

    end_ns: int

    def read(self) -> Heard: ...


class Target(Protocol):
    async def ask(self, question: Question) -> Answer: ...

    async def kv_used(self) -> float | None:
        """Share of the KV cache that running requests hold; None where nobody tells."""

    async def close(self) -> None: ...


@dataclass
class HttpAnswer:
    end_ns: int
    status: int
    pieces: Sequence[tuple[int, bytes]]
    is_stream: bool

    def read(self) -> Heard:
        body = b"".join(data for _, data in self.pieces)
        if self.status != 200:
            return Heard(error=f"status {self.status}: {body[:200].decode('utf-8', 'replace')}")
        return read_stream(self.pieces) if self.is_stream else read_whole(body)


@dataclass
class HttpTarget:
    """An OpenAI-compatible server."""

    url: str
    model: str
    endpoint: Endpoint = "completions"
    is_stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request's body."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._connections = Connections(self.url)
        self._kv_path: str | None = "/stats"

    def body(self, question: Question) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": question.max_tokens}
        body |= {"temperature": 0, "stream": self.is_stream}
        if self.is_stream:
            body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = question.messages
        else:
            body["prompt"] = question.whole_text
        return json.dumps({**body, **self.extra}).encode()

    async def ask(self, question: Question) -> HttpAnswer:
        reply = await self._connections.ask(
            "POST", PATHS[self.endpoint], self.body(question), dict(self.headers)
        )
        end_ns = time.monotonic_ns()
        return HttpAnswer(end_ns, reply.status, reply.pieces, self.is_stream)

    async def get(self, path: str) -> Any:
        """JSON, or text where it is none; None where the server has no such page."""
        reply = await self._connections.ask("GET", path, headers=dict(self.headers))
        if reply.status != 200:
            return None
        try:
            return json.loads(reply.body)
        except ValueError:
            return reply.body.decode("utf-8", "replace")

    async def kv_used(self) -> float | None:
        if self._kv_path is None:
            return None
        share = kv_share(await self.get(self._kv_path))
        if share is None:  # another kind of server; asked again where that one might tell
            self._kv_path = "/metrics" if self._kv_path == "/stats" else None
        return share

    async def close(self) -> None:
        self._connections.close()


def kv_share(page: Any) -> float | None:
    """Of martlet's /stats, or of metrics in vLLM's words."""
    if isinstance(page, dict) and isinstance(blocks := page.get("kv_blocks"), dict):
        return blocks["used"] / blocks["total"] if blocks.get("total") else None
    lines = page.splitlines() if isinstance(page, str) else []
    found = [line.split()[-1] for line in lines if line.startswith(KV_SERIES)]
    return float(found[0]) if found else None


@dataclass
class DirectAnswer:
    end_ns: int
    heard: Heard

    def read(self) -> Heard:
        return self.heard


@dataclass
class DirectTarget:
    """An engine, without a server. With speculation every token is a piece of its own."""

    engine: Engine
    tokenizer: Tokenizer

    async def ask(self, question: Question) -> DirectAnswer:
        from martlet.runtime.sampling_params import SamplingParams

        loop = asyncio.get_running_loop()
        end: asyncio.Future[FinishEvent] = loop.create_future()
        moments: list[int] = []
        texts: list[str] = []

        def settle(event: FinishEvent) -> None:
            if not end.done():  # else whoever asked has gone
                end.set_result(event)

        def on_event(event: Event) -> None:
            if isinstance(event, TokenEvent):
                moments.append(time.monotonic_ns())
                texts.append(event.text)
            elif isinstance(event, FinishEvent):
                loop.call_soon_threadsafe(settle, event)

        ids = self.tokenizer.encode(question.whole_text, add_special=True, parse_special=True)
        params = SamplingParams(max_tokens=question.max_tokens, ignore_eos=True)
        request = self.engine.submit(ids, params, on_event)
        try:
            finish = await end
        except asyncio.CancelledError:
            self.engine.cancel(request.id)
            raise
        return DirectAnswer(time.monotonic_ns(), heard_directly(finish, moments, texts))

    async def kv_used(self) -> float | None:
        now = self.engine.stats()
        return now.blocks_used / now.blocks_total

    async def close(self) -> None:
        return None


def heard_directly(finish: FinishEvent, moments: list[int], texts: list[str]) -> Heard:
    is_well = finish.reason in ("stop", "length")
    return Heard(
        piece_ns=moments,
        piece_totals=list(range(1, len(moments) + 1)),
        text="".join(texts) + finish.text,
        usage={
            "prompt_tokens": finish.n_prompt,
            "completion_tokens": finish.n_output,
            "prompt_tokens_details": {"cached_tokens": finish.n_cached},
        },
        timings={"queue_ms": finish.timings.queue_ms, "prefill_ms": finish.timings.prefill_ms},
        reason=finish.reason,
        error=None if is_well else finish.error or finish.reason,
    )
