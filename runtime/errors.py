"""Typed errors of the runtime, and the shared ones again for convenience.

Owns: the errors a caller of Engine can meet. Must not know: HTTP statuses or how they are shown.
"""

from ..quant.errors import FileChanged, FileFormatError, MartletError, UnsupportedError

__all__ = [
    "ContextTooLong",
    "FileChanged",
    "FileFormatError",
    "MartletError",
    "ModelError",
    "NotEnoughMemory",
    "QueueFull",
    "RequestError",
    "UnsupportedError",
]


class RequestError(MartletError):
    """A value in the request is not acceptable; `field` names it so that a server can repeat it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextTooLong(MartletError):
    """The request needs more tokens than the context, or the whole KV pool, can hold."""

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class QueueFull(MartletError):
    """As many requests are unfinished as the engine may hold; trying again later is right."""

    def __init__(self, message: str, *, unfinished: int, limit: int) -> None:
        super().__init__(message)
        self.unfinished = unfinished
        self.limit = limit


class NotEnoughMemory(MartletError):
    """Loading would take more than the system has left. Nothing was loaded."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class ModelError(MartletError):
    """The model or its executor failed while running: a fault of ours, not of the request."""
