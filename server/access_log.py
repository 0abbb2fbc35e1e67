"""One record per request: who asked what of which size, how it ended, how long it took.

Owns: AccessLog and the fields of a record. Must not know: where records go, dialects.
A record holds no text of prompts or answers; `body` comes in only where prompts are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answer import Choice, slowest, usage
from .options import Log

MAX_BODY_CHARS = 100_000
MAX_PATH_CHARS = 200


class AccessLog:
    """ASGI middleware before all others, so that it also sees what they refuse."""

    def __init__(self, app: ASGIApp, log: Log, has_prompts: bool = False) -> None:
        self._app = app
        self._log = log
        self._has_prompts = has_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_ns = time.monotonic_ns()
        seen: dict[str, Any] = {"status": None, "body": b""}

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            await send(message)

        async def watched_receive() -> Message:
            message = await receive()
            if len(seen["body"]) < MAX_BODY_CHARS:
                seen["body"] += message.get("body", b"")
            return message

        try:
            await self._app(scope, watched_receive if self._has_prompts else receive, watched_send)
        finally:
            if _is_worth_it(scope, seen["status"]):
                self._log(self._record(scope, seen, time.monotonic_ns() - start_ns))

    def _record(self, scope: Scope, seen: dict[str, Any], spent_ns: int) -> dict[str, Any]:
        state = scope.get("state", {})
        record = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": state.get("request_id"),
            "client": (scope.get("client") or (None,))[0],
            "method": scope["method"],
            "path": scope["path"][:MAX_PATH_CHARS],
            "status": seen["status"],
            "ms": round(spent_ns / 1e6, 3),
            **figures(state.get("choices") or ()),
        }
        if self._has_prompts:
            record["body"] = seen["body"].decode("utf-8", "replace")[:MAX_BODY_CHARS]
        return record


def _is_worth_it(scope: Scope, status: int | None) -> bool:
    """What only looks, as pages and scrapers do all day, is left out while it succeeds."""
    return scope["method"] not in ("GET", "HEAD") or status is None or status >= 400


def figures(choices: Sequence[Choice]) -> dict[str, Any]:
    """Of an answer, as far as it came."""
    if not choices:
        return {}
    counts, end = usage(choices), slowest(choices)
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": counts["completion_tokens"],
        "finish": [choice.finish.reason if choice.finish else None for choice in choices],
        "queue_ms": end.timings.queue_ms if end else None,
        "ttft_ms": end.timings.ttft_ms if end else None,
    }
