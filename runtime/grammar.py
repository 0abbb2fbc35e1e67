"""Grammars by llguidance: text to a compiled grammar, and that to the constraint of one answer.

Owns: the only use of llguidance; the vocabulary as it wants to see it, limits on what a grammar may
cost. Must not know: HTTP, templates, who else is running.

Everything is written in llguidance's dialect of Lark, which can hold JSON schemas and regular
expressions. Control tokens stand for no text, so that none fits a grammar unless it is named.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from .constraint import WORD_BITS, Allowed, flags_of
from .errors import ModelError, RequestError
from .grammar_size import patterns_of, written_out
from .vocabulary import WritableVocabulary

MAX_GRAMMAR_CHARS = 1 << 18
# Between tokens of JSON: a newline with its indent, or some spaces. Without a bound a model may
# write spaces for ever, and still be within the grammar.
JSON_RULES = {"whitespace_pattern": r"[ \n\t][ \t]{0,39}", "lenient": False}
MAX_REPEATS = 10_000
"""Atoms of a regular expression whose repeats are written out: each costs some of every mask."""
MAX_MASK_S = 0.025
"""Of the processor, for a mask: it holds up the answers of all others."""
N_TRIED = 4
"""Tokens of an answer that a grammar is tried out with."""
MAX_KEPT, MAX_KEPT_CHARS = 128, 1 << 21
"""Compiled grammars that wait for the next request with the same."""
# Tokens inside a JSON string are known to fit where all strings up to a length do, so the library
# keeps them apart by length; under maxLength only the longer ones are looked at one by one.
PLAIN = r'[^"\\\x00-\x1F\x7F]'
STRING_LENGTHS = (3, 6, 10, 15, 30)
INSTALL = "pip install 'martlet[structured]'"


# ---- grammars as text: Lark, with `start` as the answer ------------------------------------------


def json_value(schema: Any) -> str:
    """A Lark term for JSON that fits the schema (an object, true or false)."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    # A schema of the client's may not loosen these: they stand last, so they win.
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_RULES})}"


def json_grammar(schema: Any) -> str:
    return f"start: {json_value(schema)}"


def regex_grammar(pattern: str) -> str:
    return f"start: {regex_term(pattern)}"


def regex_term(pattern: str) -> str:
    """A Lark term for a regular expression (of Rust's regex crate: no look-around)."""
    between = re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.DOTALL)
    return "/" + between.replace("\n", r"\n") + "/"


def choice_grammar(choices: list[str]) -> str:
    return "start: " + " | ".join(map(literal, choices))


def literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def check_patterns(patterns: Iterable[str], *, field: str) -> None:
    """Raises RequestError for a regular expression that is too large, naming what makes it so."""
    for pattern in patterns:
        size = written_out(pattern)
        if size.n > MAX_REPEATS:
            raise RequestError(
                f"{field}: the pattern {pattern[:60]!r} is too large: {size.largest} repeats make"
                f" it {size.n:,} characters or classes, at most {MAX_REPEATS:,}",
                field=field,
            )


def check_schema(schema: Any, *, field: str) -> None:
    """The same for the regular expressions of a JSON schema."""
    check_patterns(patterns_of(schema), field=field)


# ---- compiled ------------------------------------------------------------------------------------


class Grammars:
    """Compiles grammars for one model, each once for as long as it is kept. From any thread; the
    vocabulary is laid out at the first."""

    def __init__(self, tokenizer: WritableVocabulary, *, max_mask_s: float = MAX_MASK_S) -> None:
        self._tokenizer = tokenizer
        self._max_mask_s = max_mask_s
        self._lock = threading.Lock()
        self._laid_out: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, grammar: str, *, field: str) -> Grammar:
        """Raises RequestError with what is wrong, naming `field` of the request."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{field}: {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS}", field=field
            )
        with self._lock:
            if kept := self._kept.get(grammar):
                self._kept.move_to_end(grammar)
                return kept
        compiled = self._compile(grammar, field)
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: str, field: str) -> Grammar:
        library = _library(field)
        text = library.LLMatcher.grammar_from_lark(grammar)
        matcher = library.LLMatcher(self._vocabulary(library), text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{field}: {_reason(matcher.get_error())}", field=field)
        compiled = Grammar(matcher, self._tokenizer.vocab_size)
        try:
            mask_s = self._try_out(compiled)
        except ModelError as error:
            raise RequestError(f"{field}: {error}", field=field) from None
        if mask_s is None:
            raise RequestError(f"{field}: no answer can fit this grammar", field=field)
        if mask_s > self._max_mask_s:
            raise RequestError(
                f"{field}: too large: each token takes {mask_s * 1e3:.0f} ms of the processor to"
                f" check, at most {self._max_mask_s * 1e3:.0f}; use a simpler one",
                field=field,
            )
        return compiled

    def _try_out(self, compiled: Grammar) -> float | None:
        """Seconds per mask at the beginning of two answers; None where none can begin.

        Raises ModelError: what is beyond the library's limits often shows behind the first token.
        """
        ends = [*self._tokenizer.eog_ids]
        n_masks, begun = 0, time.thread_time()
        for pick in (0, -1):
            way = compiled.start()
            for _ in range(N_TRIED):
                allowed = flags_of(way.allowed(), self._tokenizer.vocab_size)
                n_masks += 1
                if n_masks == 1 and not allowed.any():
                    return None
                allowed[ends] = False
                ids = np.flatnonzero(allowed)
                if not ids.size:
                    break
                way.accept(int(ids[pick]))
                if way.is_done:
                    break
        return (time.thread_time() - begun) / n_masks

    def lark(self, text: str, *, field: str) -> str:
        """A client's own grammar, Lark or GBNF, as Lark. Raises RequestError."""
        _library(field)
        try:
            return str(import_module("llguidance.gbnf_to_lark").any_to_lark(text))
        except Exception as error:  # its reader raises whatever comes to hand
            raise RequestError(f"{field}: {error!s:.300}", field=field) from None

    def _vocabulary(self, library: Any) -> Any:
        with self._lock:
            if self._laid_out is None:
                self._laid_out = _lay_out(library, self._tokenizer)
            return self._laid_out


class Grammar:
    """Compiled and found good. Each answer gets a constraint of its own."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size)


class GrammarConstraint:
    """A Constraint: one answer's way through a grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.empty(-(-vocab_size // WORD_BITS), np.uint32)
        self._address = self._bits.ctypes.data

    def allowed(self) -> Allowed:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._check()
        return self._bits

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        # In this state the library allows an end of the answer, which would look like a good one.
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise ModelError(f"the grammar of the answer failed: {reason}; use a simpler one")


def _library(field: str) -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise RequestError(
            f"{field}: constrained output needs a package that is not installed; {INSTALL}",
            field=field,
        ) from None


def _lay_out(library: Any, tokenizer: WritableVocabulary) -> Any:
    if not tokenizer.eog_ids:
        raise ModelError("the model has no end-of-generation token, so no grammar can end")
    return library.LLTokenizer(
        library.TokenizerWrapper(_Words(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=sorted(tokenizer.eog_ids),
        slices=[PLAIN + f"{{1,{length}}}" for length in STRING_LENGTHS] + [PLAIN + "+"],
    )


class _Words:
    """The vocabulary under the names the library looks for."""

    def __init__(self, tokenizer: WritableVocabulary) -> None:
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.eog_ids)
        self.eos_token_id, self.bos_token_id = min(tokenizer.eog_ids), tokenizer.bos_id
        self.tokens = [
            tokenizer.token_bytes(id_, special=True) for id_ in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer
        self._by_bytes: dict[bytes, int] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would write what the grammar leaves no choice about."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._encode(raw.decode())
        # Some vocabularies put a space before a text: then the ids are those of another text.
        if b"".join(self.tokens[id_] for id_ in ids) == raw:
            return ids
        before = self._encode("\n")
        ids = self._encode("\n" + raw.decode())[len(before) :]
        return ids if b"".join(self.tokens[id_] for id_ in ids) == raw else self._longest(raw)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def _longest(self, raw: bytes) -> list[int]:
        """The longest token that fits, again and again."""
        if not self._by_bytes:
            special = set(self.special_token_ids)
            self._by_bytes = {
                word: id_ for id_, word in enumerate(self.tokens) if id_ not in special and word
            }
        ids = []
        while raw:
            n = next((n for n in range(min(len(raw), 64), 0, -1) if raw[:n] in self._by_bytes), 0)
            if not n:
                break  # the library checks how far it came
            ids.append(self._by_bytes[raw[:n]])
            raw = raw[n:]
        return ids


def _reason(error: str) -> str:
    """One line of the library's message, without the grammar it quotes."""
    text = error.split("\n<state>")[0]
    text = re.sub(r"^at \d+\(\d+\): ", "", re.split(r"\n *\d+ \| ", text)[0])
    text = re.sub(r"^failed to compile JSON schema: ?", "", text)
    return " ".join(text.split())[:300]
