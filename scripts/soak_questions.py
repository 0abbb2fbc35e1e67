"""What the visitors of a long soak ask, in every dialect, and what counts in the answers.
Owns the kinds of questions; must not know clients, servers or what is made of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

N_PREFIXES = 6
MOST_WORD = 8
"""Characters of a word with its space, and so the most tokens it may be."""
OWN = 5
"""Of all words a fifth is a prompt's own at most."""
ROOM = 500
"""Tokens of the context that are kept for templates, tools and the answer."""
MOST_OUTPUT = 40

Json: TypeAlias = dict[str, Any]

# Names, times, and what the cache held: two equal answers differ in these.
VOLATILE = frozenset(
    {
        *("id", "call_id", "item_id", "response_id", "created", "created_at", "completed_at"),
        *("timings", "prompt_tokens_details", "input_tokens_details"),
        *("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"),
        *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
        *("prompt_eval_count",),
    }
)

PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["name", "people"],
    "additionalProperties": False,
}
TOOL = {"name": "look_up", "description": "finds a place", "parameters": PLACE}


@dataclass(frozen=True)
class Question:
    kind: str
    path: str
    body: Json
    n_requests: int = 1
    """How many requests of the engine it makes."""

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        return str(self.body["model"])


@dataclass(frozen=True)
class Asking:
    """What a kind makes its questions of."""

    text: str
    seed: int
    temperature: float
    n_output: int

    @property
    def chat(self) -> Json:
        return {"messages": [{"role": "user", "content": self.text}]}

    @property
    def sampled(self) -> Json:
        return {"seed": self.seed, "temperature": self.temperature, "max_tokens": self.n_output}


def _schema(ask: Asking) -> Json:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    return {**ask.chat, **ask.sampled, "response_format": form}


def _tools(ask: Asking) -> Json:
    tools = [{"type": "function", "function": TOOL}]
    return {**ask.chat, **ask.sampled, "tools": tools, "tool_choice": "required"}


def _completion(ask: Asking, **more: Any) -> Json:
    return {"prompt": ask.text, **ask.sampled, "ignore_eos": True, **more}


SCORED = {"echo": True, "logprobs": 1, "max_tokens": 0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

# kind -> (path, body, requests of the engine)
KINDS: Mapping[str, tuple[str, Callable[[Asking], Json], int]] = {
    "text": ("/v1/completions", lambda ask: _completion(ask, **STREAM), 1),
    "text of two": ("/v1/completions", lambda ask: _completion(ask, n=2, logprobs=2), 2),
    "score": (
        "/v1/completions",
        lambda ask: {"prompt": ask.text, **SCORED, "seed": ask.seed},
        1,
    ),
    "chat": ("/v1/chat/completions", lambda ask: {**ask.chat, **ask.sampled, **STREAM}, 1),
    "penalties": (
        "/v1/chat/completions",
        lambda ask: {**ask.chat, **ask.sampled, "repetition_penalty": 1.2, "top_k": 20},
        1,
    ),
    "schema": ("/v1/chat/completions", _schema, 1),
    "tools": ("/v1/chat/completions", _tools, 1),
    "responses": (
        "/v1/responses",
        lambda ask: {"input": ask.text, "temperature": 0, "max_output_tokens": ask.n_output},
        1,
    ),
    "messages": (
        "/v1/messages",
        lambda ask: {**ask.chat, "temperature": 0, "max_tokens": ask.n_output},
        1,
    ),
    "ollama": (
        "/api/generate",
        lambda ask: {
            "prompt": ask.text,
            "stream": False,
            "options": {"seed": ask.seed, "num_predict": ask.n_output},
        },
        1,
    ),
    "embedding": ("/v1/embeddings", lambda ask: {"input": ask.text}, 1),
    "tokens": ("/tokenize", lambda ask: {"content": ask.text}, 0),
}
# What a model without a chat template is asked.
PLAIN = ("text", "text of two", "score", "embedding", "tokens")


def questions(
    draw: Random, model: str, kinds: tuple[str, ...], n_each: int, context: int
) -> list[Question]:
    """n_each of every kind. Prompts begin alike, so that they share blocks."""
    n_words = max(2 * OWN, (context - ROOM) // MOST_WORD)
    n_own = n_words // OWN
    prefixes = [words(draw, n_words - n_own) for _ in range(N_PREFIXES)]
    made = []
    for kind in kinds:
        path, body, n_requests = KINDS[kind]
        for _ in range(n_each):
            ask = Asking(
                draw.choice(prefixes) + words(draw, n_own),
                draw.randrange(1 << 32),
                draw.choice((0.0, 0.8)),
                draw.randrange(1, MOST_OUTPUT + 1),
            )
            made.append(Question(kind, path, {"model": model, **body(ask)}, n_requests))
    return made


def words(draw: Random, most: int) -> str:
    letters = "aeioudnrstl"
    n = draw.randrange(1, most)
    return "".join(
        "".join(draw.choices(letters, k=draw.randrange(1, MOST_WORD))) + " " for _ in range(n)
    )


def what_counts(value: Any) -> Any:
    """An answer's JSON without what may differ between equal ones."""
    if isinstance(value, dict):
        return {key: what_counts(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [what_counts(each) for each in value]
    return value


class Streamed:
    """What a stream of the two OpenAI routes has said so far."""

    def __init__(self) -> None:
        self.text, self.reason, self.n_output, self.is_over = "", None, None, False
        self.error: str | None = None

    def line(self, line: bytes) -> bool:
        """Whether it was an event."""
        if not line.startswith(b"data: "):
            return False
        if line == b"data: [DONE]\n":
            self.is_over = True
            return False
        event = json.loads(line[6:])
        if "error" in event:
            self.error = str(event["error"])
            return False
        for choice in event["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.reason = choice["finish_reason"] or self.reason
        self.n_output = (event.get("usage") or {}).get("completion_tokens", self.n_output)
        return True

    @property
    def answer(self) -> Json:
        return {"text": self.text, "reason": self.reason, "n_output": self.n_output}
