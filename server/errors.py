"""How errors look on the wire: OpenAI's object, the right status, never the client's input.

Owns: ApiError, the table from typed errors to statuses, the shape of the body. Must not know:
routes, or what the request was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from ..runtime.errors import ContextTooLong, MartletError, QueueFull, RequestError

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

    def body(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        shape = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": shape}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, dict(self.headers))


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
    if isinstance(error, RequestError):
        return refused(str(error), param=error.field)
    return fault(str(error))
