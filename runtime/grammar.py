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
from importlib import import_module
from typing import Any

import numpy as np

from .constraint import Allowed
from .errors import ModelError, RequestError
from .vocabulary import WritableVocabulary

MAX_GRAMMAR_CHARS = 1 << 18
# Between tokens of JSON: a newline with its indent, or some spaces. Without a bound a model may
# write spaces for ever, and still be within the grammar.
JSON_RULES = {"whitespace_pattern": r"[ \n\t][ \t]{0,39}", "lenient": False}
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


# ---- compiled ------------------------------------------------------------------------------------


class Grammars:
    """Compiles grammars for one model. From any thread; the vocabulary is laid out at the first."""

    def __init__(self, tokenizer: WritableVocabulary) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._laid_out: Any = None

    def compile(self, grammar: str, *, field: str) -> Grammar:
        """Raises RequestError with what is wrong, naming `field` of the request."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{field}: {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS}", field=field
            )
        library = _library(field)
        text = library.LLMatcher.grammar_from_lark(grammar)
        matcher = library.LLMatcher(self._vocabulary(library), text, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{field}: {_reason(matcher.get_error())}", field=field)
        compiled = Grammar(matcher, self._tokenizer.vocab_size)
        try:
            can_begin = compiled.start().allowed().any()
        except ModelError as error:
            raise RequestError(f"{field}: {error}", field=field) from None
        if not can_begin:
            raise RequestError(f"{field}: no answer can fit this grammar", field=field)
        return compiled

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
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = np.empty(-(-vocab_size // 32), np.uint32)
        self._address = self._bits.ctypes.data

    def allowed(self) -> Allowed:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._check()
        bits = self._bits.view(np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

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
    wrapper = library.TokenizerWrapper(_Words(tokenizer))
    return library.LLTokenizer(
        wrapper, n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eog_ids)
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
