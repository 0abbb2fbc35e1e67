"""Server-sent events as text.

Framing: one `data: ` line and a blank line per event, comments as signs of life, never `id:`;
newlines and U+2028 only as JSON escapes.
"""

from __future__ import annotations

import json

from .reply import Json

MEDIA_TYPE = "text/event-stream"
PING = ": ping\n\n"
DONE = "data: [DONE]\n\n"


def sse(value: Json) -> str:
    return f"data: {to_json(value)}\n\n"


def named_sse(value: Json) -> str:
    """For dialects that repeat an object's type as the name of its event."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n"


def to_json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def frame(written: str) -> tuple[str, str]:
    """The text before and after its last empty string, to put other strings in its place."""
    before, _, after = written.rpartition('""')
    return before, after
