"""The two files of `martlet batch`: requests of OpenAI's batch format, and an answer to each.
Owns what makes them valid, which requests are answered already, and that none is answered twice."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from martlet.quant.errors import MartletError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchError(MartletError):
    """A file that is no batch. Nothing was computed, and nothing written."""


class Request(NamedTuple):
    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[Request]:
    """Line by line, as a file may be larger than memory; empty lines are none. Raises BatchError
    with the line's number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _request(line, f"{path}, line {number}")


def _request(line: bytes, where: str) -> Request:
    try:
        value = json.loads(line)
    except ValueError as error:  # no UTF-8 as well
        raise BatchError(f"{where} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BatchError(f"{where} is no JSON object")
    custom_id, url, body = (value.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchError(f"{where}: custom_id must be a string that is not empty")
    if value.get("method", "POST") != "POST" or url not in URLS:
        raise BatchError(f"{where}: method and url must be POST and one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BatchError(f"{where}: body must be an object")
    if body.get("stream"):
        raise BatchError(f"{where}: answers of a batch are whole; leave stream out")
    return Request(custom_id, url, body)


def known_ids(path: Path) -> set[str]:
    """Of all requests. Raises BatchError, also where two have the same."""
    found: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in found:
            raise BatchError(f"{path}: custom_id {request.custom_id!r} stands there twice")
        found.add(request.custom_id)
    return found


class Answers:
    """The file of answers, to which a line is added as soon as a request is answered. A line that a
    killed process left half-written is cut off, and its request answered again."""

    def __init__(self, path: Path, requests: set[str]) -> None:
        """requests: their ids. Raises BatchError for a file of something else, or in use."""
        self.path = path
        self._file: IO[bytes] = path.open("a+b")
        try:
            self._lock()
            self.answered, end = self._read(requests)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(end)

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()

    def add(self, custom_id: str, status: int, request_id: str, body: Any) -> None:
        """One write of one line, which is whole or cut off at the next start."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}
        text = json.dumps({**line, "response": response, "error": None}, separators=(",", ":"))
        self._file.write(text.encode() + b"\n")
        self._file.flush()
        self.answered.add(custom_id)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"another batch writes {self.path}; wait for its end") from None

    def _read(self, requests: set[str]) -> tuple[set[str], int]:
        """(ids that have an answer, bytes of whole lines)."""
        self._file.seek(0)
        answered: set[str] = set()
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                custom_id = json.loads(line)["custom_id"]
            except (ValueError, TypeError, KeyError):
                raise BatchError(
                    f"{self.path} holds something else than answers of a batch; give another name"
                ) from None
            if custom_id not in requests:
                raise BatchError(
                    f"{self.path} answers {custom_id!r}, which is not asked; give another name"
                )
            answered.add(custom_id)
            end += len(line)
        return answered, end
