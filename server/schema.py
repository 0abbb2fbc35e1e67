"""What requests of the two OpenAI dialects, chat completions and completions, may say.

Owns: their honoured fields with types and integer ranges, the translation to SamplingParams. Must
not know: templates, the engine, HTTP beyond ApiError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ..runtime.sampling_params import SamplingParams
from ..runtime.service import Service
from .asking import (
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    Asked,
    Count,
    Number,
    Positive,
    Strict,
    stops,
)
from .errors import refused
from .fields import OPENAI, FieldRules
from .form_fields import FormFields
from .reasoning import Effort
from .tool_fields import ToolFields

MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_STOP_IDS = 128


def _biases(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id to bias")
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("keys must be token ids") from None


def prompt_list(value: Any, most: int = MAX_PROMPTS) -> Any:
    """Every allowed form as a list of prompts, each a string or a list of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of ids or a list of those")
    prompts = [value] if type(value[0]) is int else value
    if len(prompts) > most:
        raise ValueError(f"{len(prompts)} prompts, at most {most} in one request")
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


class TextPart(Strict):
    """As the schema has it; parts are looked at by _content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: Annotated[
        Any, BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any] | None)
    ] = None


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Any, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Asked):
    """The sampler's fields and the class of service, as OpenAI and its extensions name them."""

    temperature: Number = 1.0
    top_k: Count = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(stops, json_schema_input_type=str | list[str])] = (
        Field(default_factory=list)
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] = Field(
        default_factory=list
    )
    ignore_eos: bool = False
    min_tokens: Count = 0
    logit_bias: Annotated[dict[int, Number], BeforeValidator(_biases)] = Field(default_factory=dict)
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    speculate_rule: Literal["match", "reject"] | None = None
    service_tier: Literal["auto", "default", "priority", "scale", "flex"] = "auto"

    SAMPLING: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "ignore_eos",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "speculate_rule",
    )

    @property
    def service(self) -> Service:
        return "background" if self.service_tier == "flex" else "interactive"

    @property
    def limits(self) -> list[int | None]:
        """Of output tokens; the smallest counts."""
        return []

    def sampling(self, vocab_size: int) -> SamplingParams:
        for token_id in self.logit_bias:
            check_token_id(token_id, vocab_size, "logit_bias")
        for token_id in self.stop_token_ids:
            check_token_id(token_id, vocab_size, "stop_token_ids")
        return SamplingParams(
            **{name: getattr(self, name) for name in self.SAMPLING},
            max_tokens=min((n for n in self.limits if n is not None), default=None),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            logprobs=self.n_logprobs,
            prompt_logprobs=self.n_prompt_logprobs,
        )


class Generation(Sampled, FormFields):
    """What both generating routes share."""

    RULES: ClassVar[FieldRules] = OPENAI

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool = False

    @property
    def n_asks(self) -> int:
        return self.n

    @property
    def n_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs are part of a whole answer only", "prompt_logprobs")
        return self.prompt_logprobs

    @property
    def limits(self) -> list[int | None]:
        return [self.max_tokens, self.max_completion_tokens]


class TemplateArguments(Strict):
    """Those that every template means alike; another one is refused by name."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def effort(self) -> tuple[str, str] | None:
        """How much reasoning, and the field that says so."""
        for name, value in self:
            if value is not None:
                return "medium" if value else "none", f"chat_template_kwargs.{name}"
        return None


class ChatRequest(Generation, ToolFields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    chat_template_kwargs: TemplateArguments = TemplateArguments()

    @property
    def effort(self) -> tuple[str | None, str]:
        """How much reasoning, and the field that says so."""
        return self.chat_template_kwargs.effort or (self.reasoning_effort, "reasoning_effort")

    @property
    def n_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


Prompts = str | list[str] | list[int] | list[list[int]]
"""As they may be written; `prompt_list` makes one form of them."""


class CompletionRequest(Generation):
    prompt: Annotated[list[Any], BeforeValidator(prompt_list, json_schema_input_type=Prompts)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    suffix: str = ""
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
        return self.logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        """What is echoed has its logprobs as the answer has them; where nothing is to be drawn,
        the echo is what was asked for."""
        of_echo = 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs
        given = (super().n_prompt_logprobs, of_echo if self.echo else None)
        return max((n for n in given if n is not None), default=None)

    def sampling(self, vocab_size: int) -> SamplingParams:
        params = super().sampling(vocab_size)
        needs_logprobs = params.logprobs is None and self.n_asks > self.n
        return replace(params, logprobs=0) if needs_logprobs else params


def check_token_id(token_id: int, vocab_size: int, field: str) -> None:
    if not 0 <= token_id < vocab_size:
        shown = token_id if abs(token_id) <= MAX_SEED else "a very large number"
        raise refused(f"{field}: token id {shown}, vocabulary has {vocab_size}", param=field)
