r"""How a tokenizer.json cuts text before merging, in one form whichever way it is written.

Owns: that form, and finding the name that GGUF has for it. Must not know: vocabularies, ids.
The names and what they stand for are passed in, in the same JSON as the checkpoint's.

Several writings mean the same: a ByteLevel with its own pattern or a Split with that pattern
before a ByteLevel without; a Digits or a Split at `\p{N}`; sequences inside sequences; a Split
that removes what does not match where all does; and within a pattern the order of a set's members
and escapes of characters that need none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FileFormatError, UnsupportedError

Steps = tuple[tuple[str, str], ...]
_BYTES = ("bytes", "")
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_COVERING = (("Isolated", False), ("Removed", True))  # (behavior, invert) that keep all text


@dataclass(frozen=True)
class PreTokenizerForm:
    """What a value of `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: Mapping[str, Any]  # JSON as in a tokenizer.json
    ignore_merges: bool
    nfc: bool


def find_name(tokenizer: Mapping[str, Any], known: Mapping[str, PreTokenizerForm]) -> str:
    """The first name that stands for what this tokenizer.json does."""
    steps = canonical_steps(tokenizer.get("pre_tokenizer"))
    nfc = _reads_nfc(tokenizer.get("normalizer"))
    ignores = bool(tokenizer["model"].get("ignore_merges", False))
    near = []
    for name, form in known.items():
        if canonical_steps(form.pre_tokenizer) == steps:
            if (form.ignore_merges, form.nfc) == (ignores, nfc):
                return name
            near.append(name)
    if near:
        raise UnsupportedError(
            f"tokenizer.json cuts text as {near[0]!r} does, but no known name goes with "
            f"ignore_merges = {ignores} and NFC = {nfc}"
        )
    shown = ", ".join(pattern or kind for kind, pattern in steps)
    raise UnsupportedError(f"tokenizer.json: the pre-tokenizer is not a known one: {shown}")


def canonical_steps(pre_tokenizer: Any) -> Steps:
    return tuple(_steps(pre_tokenizer))


def _steps(node: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(node, dict):
        raise UnsupportedError(f"tokenizer.json: the pre-tokenizer is {node!r:.80}")
    kind = node.get("type")
    if kind == "Sequence" and isinstance(node.get("pretokenizers"), list):
        for inner in node["pretokenizers"]:
            yield from _steps(inner)
    elif kind == "Split":
        yield _split(node)
    elif kind == "Digits":
        yield ("split", canonical_pattern(r"\p{N}" if node.get("individual_digits") else r"\p{N}+"))
    elif kind == "Punctuation":
        yield ("punctuation", str(node.get("behavior", "Isolated")).lower())
    elif kind == "ByteLevel":
        if node.get("add_prefix_space", True):
            raise UnsupportedError("tokenizer.json: ByteLevel with add_prefix_space = true")
        if node.get("use_regex", True):
            yield ("split", canonical_pattern(_GPT2_PATTERN))
        yield _BYTES
    else:
        raise UnsupportedError(f"tokenizer.json: the pre-tokenizer {kind!r} is not supported")


def _split(node: Mapping[str, Any]) -> tuple[str, str]:
    pattern = node.get("pattern")
    if not isinstance(pattern, dict):
        raise FileFormatError(f"tokenizer.json: a Split has the pattern {pattern!r:.80}")
    if (node.get("behavior"), bool(node.get("invert"))) not in _COVERING:
        raise UnsupportedError(
            f"tokenizer.json: a Split with behavior {node.get('behavior')!r} and invert "
            f"{node.get('invert')!r} is not supported"
        )
    if isinstance(pattern.get("Regex"), str):
        return ("split", canonical_pattern(pattern["Regex"]))
    if isinstance(pattern.get("String"), str):
        return ("split", canonical_pattern(re.escape(pattern["String"])))
    raise FileFormatError(f"tokenizer.json: a Split has the pattern {pattern!r:.80}")


def _reads_nfc(node: Any) -> bool:
    """Whether characters are composed first; other normalizers of byte-level text are refused."""
    if node is None:
        return False
    kind = node.get("type") if isinstance(node, dict) else None
    if kind == "NFC":
        return True
    if kind == "Sequence" and isinstance(node.get("normalizers"), list):
        return any([_reads_nfc(inner) for inner in node["normalizers"]])
    raise UnsupportedError(f"tokenizer.json: the normalizer {kind!r} is not supported")


# -- patterns -------------------------------------------------------------------------------------

_CODE = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}|\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})")
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\.", re.DOTALL)
_WHITE = {"\\r": "\r", "\\n": "\n", "\\t": "\t"}
_META = frozenset(r"\^$.|?*+()[]{}")
_SET_META = frozenset("\\^-[]&")


def canonical_pattern(pattern: str) -> str:
    """Equal for patterns that differ in escapes and in the order of a set's members only."""
    out, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            text, at = _canonical_set(pattern, at)
        else:
            text, at = _atom(pattern, at, _META)
        out.append(text)
    return "".join(out)


def _atom(pattern: str, at: int, meta: frozenset[str]) -> tuple[str, int]:
    """One character or class at this place, and where the next one begins."""
    if code := _CODE.match(pattern, at):
        number = int(next(filter(None, code.groups())), 16)
        return _quoted(chr(min(number, 0x10FFFF)), meta), code.end()
    escaped = _CLASS.match(pattern, at)
    if escaped is None:
        return pattern[at], at + 1
    text = escaped.group()
    if text in _WHITE:
        return _WHITE[text], escaped.end()
    is_class = text[1].isalnum()
    return text if is_class else _quoted(text[1:], meta), escaped.end()


def _quoted(char: str, meta: frozenset[str]) -> str:
    return f"\\{char}" if char in meta else char


def _member(pattern: str, at: int) -> tuple[str, int]:
    text, at = _atom(pattern, at, _SET_META)
    return (f"\\{text}" if text in _SET_META else text), at


def _canonical_set(pattern: str, at: int) -> tuple[str, int]:
    """A bracketed set with its members in order; one that nests others stays as it is, and so does
    one without end."""
    start, at = at, at + 1
    is_negated = pattern.startswith("^", at)
    at += is_negated
    members = []
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "[" or pattern.startswith("&&", at):
            return pattern[start : at + 1], at + 1
        member, at = _member(pattern, at)
        if pattern.startswith("-", at) and pattern[at + 1 : at + 2] not in ("", "]"):
            end, at = _member(pattern, at + 1)
            member = f"{member}-{end}"
        members.append(member)
    if at >= len(pattern):
        return pattern[start:], at  # never closed: no pattern at all
    return f"[{'^' * is_negated}{''.join(sorted(set(members)))}]", at + 1
