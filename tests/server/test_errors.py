"""What typed errors of lower layers become in an answer."""

from __future__ import annotations

from martlet.runtime.errors import NotEnoughMemory
from martlet.server.errors import from_typed


def test_a_model_that_memory_has_no_room_for_may_be_asked_for_again() -> None:
    error = NotEnoughMemory("8 bytes are needed, 7 free", needed_bytes=8, available_bytes=7)
    answer = from_typed(error)
    assert (answer.status, answer.code) == (503, "model_memory_full")
    assert int(answer.headers["Retry-After"]) > 0
    assert "8 bytes are needed" in answer.text
