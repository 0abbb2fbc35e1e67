"""Filling in the middle: a prompt of what stands before the gap and what stands behind it.

Owns: the order of the marks. Must not know: dialects, sampling.
"""

from __future__ import annotations

from ..runtime.tokenizer import Tokenizer
from .errors import refused


def infill_ids(tokenizer: Tokenizer, before: str | list[int], behind: str) -> list[int]:
    """before: text or ids. Both are content: markers that they spell out stay letters. Raises
    ApiError 400 for a model without the marks."""
    marks = tokenizer.fim
    if marks is None:
        reason = "the model's file names no tokens for filling in the middle"
        raise refused(f"suffix: {reason}", param="suffix")
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    head = before if isinstance(before, list) else tokenizer.encode_content(before)
    return [
        *bos,
        marks.prefix,
        *head,
        marks.suffix,
        *tokenizer.encode_content(behind),
        marks.middle,
    ]
