"""How errors look on the wire: the right status, the dialect's shape, never the client's input.

Owns: ApiError, the table from typed errors to statuses, the shapes of bodies and which paths have
which. Must not know: routes, or what the request was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from ..runtime.errors import (
    ContextTooLong,
    MartletError,
    NotEnoughMemory,
    QueueFull,
    RequestError,
)

MAX_MESSAGE_CHARS = 1000
RETRY_AFTER_S = 1

INVALID = "invalid_request_error"
SERVER_FAULT = "server_error"


@dataclass
class ApiError(Exception):
    """An answer that is an error. Raised anywhere under a route, shown by `response`."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        if len(self.message) <= MAX_MESSAGE_CHARS:
            return self.message
        return self.message[:MAX_MESSAGE_CHARS] + "…"

    def body(self, path: str = "") -> dict[str, Any]:
        """path: of the request; OpenAI's object unless it belongs to another dialect."""
        for prefix, shape in SHAPES:
            if path.startswith(prefix):
                return shape(self)
        return openai_shape(self)

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.body(path), self.status, dict(self.headers))


def openai_shape(error: ApiError) -> dict[str, Any]:
    shape = {"message": error.text, "type": error.type, "param": error.param, "code": error.code}
    return {"error": shape}


def ollama_shape(error: ApiError) -> dict[str, Any]:
    return {"error": error.text}


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, INVALID)
    return {"type": "error", "error": {"type": kind, "message": error.text}}


SHAPES: tuple[tuple[str, Callable[[ApiError], dict[str, Any]]], ...] = (
    ("/api/", ollama_shape),
    ("/v1/messages", anthropic_shape),
)


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that will never work as it is."""
    return ApiError(400, message, param=param, code=code)


def fault(message: str, code: str | None = None) -> ApiError:
    """Something of ours failed."""
    return ApiError(500, message, SERVER_FAULT, code=code)


def late(message: str) -> ApiError:
    """The request's own deadline has passed."""
    return ApiError(504, message, SERVER_FAULT, code="deadline_exceeded")


def from_typed(error: MartletError) -> ApiError:
    """The typed error of a lower layer as an answer."""
    if isinstance(error, ContextTooLong):
        return refused(str(error), code="context_length_exceeded")
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(503, str(error), "unavailable_error", code="queue_full", headers=headers)
    if isinstance(error, NotEnoughMemory):  # another model may be unloaded by then
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        code = "model_memory_full"
        return ApiError(503, str(error), "unavailable_error", code=code, headers=headers)
    if isinstance(error, RequestError):
        return refused(str(error), param=error.field)
    return fault(str(error))
