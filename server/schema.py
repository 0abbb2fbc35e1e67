"""What a request may say: bytes to a checked model, with errors that stay small.

Owns: the honoured fields with their types and integer ranges, JSON reading, the translation to
SamplingParams. Must not know: templates, the engine, HTTP beyond ApiError.

null means absent everywhere. Types are strict: "5", 5.0 and true are no integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ..runtime.sampling_params import SamplingParams
from ..runtime.service import Service
from .bridge import Terms
from .errors import ApiError, refused
from .fields import unknown_fields

MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_NAME_CHARS = 64
MAX_SALT_CHARS = 1000

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _biases(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id to bias")
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("keys must be token ids") from None


def _prompts(value: Any) -> Any:
    """Every allowed form as a list of prompts, each a string or a list of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of ids or a list of those")
    prompts = [value] if type(value[0]) is int else value
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts, at most {MAX_PROMPTS} in one request")
    kinds = {str if isinstance(p, str) else list if _is_ids(p) else None for p in prompts}
    if None in kinds or len(kinds) > 1:
        raise ValueError("must hold only strings, or only token ids, or only lists of token ids")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _content(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of parts")
    for part in value:
        if part.get("type") != "text":
            raise ValueError("only parts of type text are supported")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part needs a string text")
    return value


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict | None):
        raise ValueError("must be JSON text or an object")
    return value


class CalledFunction(Strict):
    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = None


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Strict):
    """What both generating routes share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Number = 1.0
    top_k: Count = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[dict[int, Number], BeforeValidator(_biases)] = {}
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    service_tier: Literal["auto", "default", "priority", "scale", "flex"] = "auto"
    deadline_ms: Positive | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    SAMPLING: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    )

    @property
    def n_asks(self) -> int:
        """Engine requests per prompt."""
        return self.n

    def terms(self, tenant: bytes) -> Terms:
        """tenant: what the client's key makes of it; b"" without keys."""
        service: Service = "background" if self.service_tier == "flex" else "interactive"
        return Terms(service, self.deadline_ms, _salt(tenant, self.cache_salt))

    @property
    def n_logprobs(self) -> int | None:
        """How many alternatives to report per token; None when logprobs are not asked for."""
        return None

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Raises RequestError for a value out of the sampler's range, ApiError for a bad id."""
        for token_id in self.logit_bias:
            check_token_id(token_id, vocab_size, "logit_bias")
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return SamplingParams(
            **{name: getattr(self, name) for name in self.SAMPLING},
            max_tokens=min(limits, default=None),
            stop=tuple(self.stop),
            logprobs=self.n_logprobs,
        )


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True

    @property
    def n_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def n_asks(self) -> int:
        best_of = self.n if self.best_of is None else self.best_of
        if best_of < self.n:
            raise refused(f"best_of is {best_of}, n is {self.n}; it must be n at least", "best_of")
        if best_of > self.n and self.stream:
            raise refused("the best of several is known at their end, so not streamed", "best_of")
        return best_of

    @property
    def n_logprobs(self) -> int | None:
        if self.echo and self.logprobs is not None:
            raise refused("echo with logprobs is not supported yet", param="echo")
        return self.logprobs

    def sampling(self, vocab_size: int) -> SamplingParams:
        params = super().sampling(vocab_size)
        needs_logprobs = params.logprobs is None and self.n_asks > self.n
        return replace(params, logprobs=0) if needs_logprobs else params


Request = TypeVar("Request", bound=Generation)


def _salt(tenant: bytes, given: str | None) -> bytes:
    """Of one length unless there is none, so that no tenant and salt look like another pair."""
    if not tenant and given is None:
        return b""
    own = b"" if given is None else b"=" + given.encode()
    return hashlib.blake2b(own, key=tenant, digest_size=16, person=b"martlet-salt").digest()


def check_token_id(token_id: int, vocab_size: int, field: str) -> None:
    if not 0 <= token_id < vocab_size:
        shown = token_id if abs(token_id) <= MAX_SEED else "a very large number"
        raise refused(f"{field}: token id {shown}, vocabulary has {vocab_size}", param=field)


def read(body: bytes, kind: type[Request]) -> tuple[Request, list[str]]:
    """The request, and the names of fields nobody knows. Raises ApiError 400."""
    given = _read_object(body)
    given = {name: value for name, value in given.items() if value is not None}
    unknown = unknown_fields(given, frozenset(kind.model_fields))
    try:
        request = kind.model_validate({k: v for k, v in given.items() if k in kind.model_fields})
    except ValidationError as error:
        raise _first_error(error) from None
    return request, [name[:MAX_NAME_CHARS] for name in unknown]


def _read_object(body: bytes) -> Mapping[str, Any]:
    try:
        # This reader also refuses lone surrogates, NaN and nesting beyond its limit.
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise refused(f"the body is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise refused("the body must be a JSON object")
    return given


def _first_error(error: ValidationError) -> ApiError:
    """One error is enough to act on; all of them could outweigh the request."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ""
    for step in first["loc"]:
        where += f"[{step}]" if isinstance(step, int) else f".{step}"[: MAX_NAME_CHARS + 1]
    where = where.removeprefix(".")
    reason = first["msg"].removeprefix("Value error, ")
    return refused(f"{where}: {reason}", param=where or None)
