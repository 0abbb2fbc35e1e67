"""What requests in Ollama's dialect may say, and which of its fields are not obeyed.

Owns: the models of /api/chat and /api/generate with their options. Must not know: templates, the
engine, HTTP. Defaults of the sampler are Ollama's, but for repeat_penalty, which is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..runtime.sampling_params import SamplingParams
from .asking import (
    MAX_INT,
    MAX_NAME_CHARS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    Asked,
    Count,
    Fields,
    Number,
    Positive,
    Strict,
    stops,
)
from .errors import refused
from .fields import MEDIA, SAMPLER, FieldRules, Refused
from .keep_alive import KeepAlive
from .structured import Form
from .tools import MAX_TOOLS, ToolUse, offered

NEVER_CUT = "a prompt that is too long is refused, never cut"
OWN_TEMPLATE = "the template is chosen when the server starts; raw leaves it out"

OPTIONS = FieldRules(
    refused={
        "typical_p": Refused(SAMPLER, (1, 1.0)),
        "tfs_z": Refused(SAMPLER, (1, 1.0)),
        "mirostat": Refused(SAMPLER, (0,)),
        "embedding_only": Refused("this server generates", (False,)),
        "vocab_only": Refused("this server generates", (False,)),
        "logits_all": Refused("use logprobs", (False,)),
    },
    # How a model is loaded was settled when the server started, and never changes an answer here.
    no_effect=frozenset(
        {
            *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "num_thread"),
            *("use_mmap", "use_mlock"),
            "num_keep",  # concerns cutting a prompt, which is not done
            *("mirostat_eta", "mirostat_tau"),  # without mirostat
            "penalize_newline",
        }
    ),
)

REQUEST = FieldRules(
    refused={
        "images": Refused(MEDIA, ([],)),
        "template": Refused(OWN_TEMPLATE, ("",)),
        "suffix": Refused("belongs to /api/generate", ("",)),
        "context": Refused("use /api/chat, which takes the messages before", ([],)),
        "truncate": Refused(NEVER_CUT, (False,)),
        "shift": Refused(NEVER_CUT, (False,)),
        "messages": Refused("belongs to /api/chat"),
        "prompt": Refused("belongs to /api/generate", ("",)),
        "system": Refused("belongs to /api/generate; here it is a message", ("",)),
        "raw": Refused("belongs to /api/generate", (False,)),
        "width": Refused(MEDIA),
        "height": Refused(MEDIA),
        "steps": Refused(MEDIA),
    },
)


def _format(value: Any) -> Any:
    """A schema; "json" is any object, "" is free text."""
    if value in ("", "json"):
        return {"type": "object"} if value else None
    if not isinstance(value, dict):
        raise ValueError('must be "json" or a JSON schema')
    return value


class OllamaOptions(Fields):
    RULES: ClassVar[FieldRules] = OPTIONS

    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT)] = -1
    num_ctx: Positive | None = None
    temperature: Number = 0.8
    top_k: Count = 40
    top_p: Number = 0.9
    min_p: Number = 0.0
    seed: Annotated[int, Field(ge=-MAX_SEED, le=MAX_SEED)] = -1
    stop: Annotated[list[str], BeforeValidator(stops, json_schema_input_type=str | list[str])] = (
        Field(default_factory=list)
    )
    repeat_penalty: Number = 1.0
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0

    def penalties(self) -> dict[str, float]:
        given = {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        has_any = given != {**dict.fromkeys(given, 0.0), "repetition_penalty": 1.0}
        if self.repeat_last_n > 0 and has_any:
            name = "options.repeat_last_n"
            raise refused(f"{name}: penalties count all tokens (-1) or are off (0)", param=name)
        return given if self.repeat_last_n else {}


class Kept(Asked):
    """A request that says how long the model is to stay afterwards."""

    keep_alive: KeepAlive | None = None


class OllamaRequest(Kept):
    """What both generating routes share."""

    RULES: ClassVar[FieldRules] = REQUEST
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {"options": OllamaOptions}

    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: Annotated[Any, BeforeValidator(_format)] = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @property
    def effort(self) -> tuple[str | None, str]:
        """How much reasoning, and the field that says so."""
        switched = {None: None, True: "medium", False: "none"}
        return (self.think if isinstance(self.think, str) else switched[self.think]), "think"

    @property
    def n_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs needs logprobs: true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def form(self) -> Form | None:
        return Form("json", self.format, "format") if self.format else None

    def check_context(self, context: int | None) -> None:
        """num_ctx asks for room, and there is as much or there is not."""
        wanted = self.options.num_ctx
        if wanted and context and wanted > context:
            name = "options.num_ctx"
            message = f"{name}: {wanted} tokens, this server has {context}; start it with --context"
            raise refused(message, param=name)

    def sampling(self, vocab_size: int) -> SamplingParams:
        options = self.options
        if options.num_predict == 0:
            name = "options.num_predict"
            raise refused(f"{name}: at least 1, or -1 for as many as fit", param=name)
        return SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed if options.seed >= 0 else None,
            max_tokens=options.num_predict if options.num_predict > 0 else None,
            stop=tuple(options.stop),
            logprobs=self.n_logprobs,
            **options.penalties(),  # type: ignore[arg-type]
        )


def _no_images(value: Any) -> Any:
    if value not in (None, []):
        raise ValueError(MEDIA)
    return value


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(Strict):
    function: CalledFunction


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[Any, BeforeValidator(_no_images)] = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude={"images", "thinking", "tool_name"})
        return {**message, "reasoning_content": self.thinking, "name": self.tool_name}


def _tool_type(value: Any) -> Any:
    if value != "function":
        raise ValueError("only functions are supported")
    return value


class OllamaFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Strict):
    type: Annotated[str, BeforeValidator(_tool_type)] = "function"
    function: OllamaFunction


class OllamaChat(OllamaRequest):
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(default_factory=list)

    @property
    def tool_use(self) -> ToolUse | None:
        return offered([tool.function.model_dump(exclude_none=True) for tool in self.tools])


class OllamaGenerate(OllamaRequest):
    RULES: ClassVar[FieldRules] = FieldRules(
        {**REQUEST.refused, "tools": Refused("belongs to /api/chat", ([],))}, REQUEST.no_effect
    )

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False


class OllamaShow(Asked):
    RULES: ClassVar[FieldRules] = FieldRules(
        refused={key: Refused(OWN_TEMPLATE, ("",)) for key in ("system", "template")}
    )

    verbose: bool = False
    name: str | None = None
    """What `model` was called before."""
