"""What requests of all dialects have in common, and how bytes become one of them.

Owns: JSON reading, strict types, Asked (the base of every dialect's request), errors that stay
small and name the field. Must not know: any dialect's fields, templates, the engine, HTTP beyond
ApiError.

null means absent everywhere. Types are strict: "5", 5.0 and true are no integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ..runtime.sampling_params import SamplingParams
from ..runtime.service import Service
from .bridge import Terms
from .errors import ApiError, refused
from .fields import FieldRules, unknown_fields
from .structured import Form
from .tools import ToolUse

MAX_INT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_NAME_CHARS = 64
MAX_SALT_CHARS = 1000
MAX_ADAPTERS = 64

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Fields(Strict):
    """An object in a request of which every field is honoured, has no effect, is refused by name
    or is reported as unknown."""

    RULES: ClassVar[FieldRules] = FieldRules()
    NESTED: ClassVar[Mapping[str, type[Fields]]] = {}
    """Fields that are such objects themselves."""


class Addressed(Fields):
    """A request to a model."""

    model: str | None = None


class AdapterShare(Strict):
    """As llama-server's requests say it: the number of an adapter, and how much of it."""

    id: Count
    scale: Number


class Asked(Addressed):
    """A request to generate, in whatever dialect."""

    deadline_ms: Positive | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    lora: Annotated[list[AdapterShare], Field(max_length=MAX_ADAPTERS)] | None = None

    @property
    def is_stream(self) -> bool:
        return bool(getattr(self, "stream", False))

    @property
    def n_asks(self) -> int:
        """Engine requests per prompt."""
        return 1

    @property
    def n_logprobs(self) -> int | None:
        """How many alternatives to report per token; None when logprobs are not asked for."""
        return None

    @property
    def form(self) -> Form | None:
        """What the answer must look like; None: free text."""
        return None

    @property
    def n_prompt_logprobs(self) -> int | None:
        """The same for tokens of the prompt."""
        return None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools the answer may call."""
        return None

    @property
    def service(self) -> Service:
        return "interactive"

    def terms(self, tenant: bytes) -> Terms:
        """tenant: what the client's key makes of it; b"" without keys."""
        adapters = None if self.lora is None else {part.id: part.scale for part in self.lora}
        salt = _salt(tenant, self.cache_salt)
        return Terms(self.service, self.deadline_ms, salt, adapters=adapters)

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Raises RequestError for a value out of the sampler's range, ApiError for a bad id."""
        raise NotImplementedError


Request = TypeVar("Request", bound=Fields)


def stops(value: Any) -> Any:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise ValueError("must be a string or a list of strings")
    if len(given) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in given):
        raise ValueError(f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return given


def _salt(tenant: bytes, given: str | None) -> bytes:
    """Of one length unless there is none, so that no tenant and salt look like another pair."""
    if not tenant and given is None:
        return b""
    own = b"" if given is None else b"=" + given.encode()
    return hashlib.blake2b(own, key=tenant, digest_size=16, person=b"martlet-salt").digest()


def read(body: bytes, kind: type[Request]) -> tuple[Request, list[str]]:
    """The request, and the names of fields nobody knows. Raises ApiError 400."""
    given = _read_object(body)
    checked, unknown = _check(given, kind, "")
    try:
        request = kind.model_validate(checked)
    except ValidationError as error:
        raise _first_error(error) from None
    return request, [name[:MAX_NAME_CHARS] for name in unknown]


def _check(
    given: Mapping[str, Any], kind: type[Fields], prefix: str
) -> tuple[dict[str, Any], list[str]]:
    """The honoured fields that are not null, and the unknown names. Raises ApiError 400."""
    given = {name: value for name, value in given.items() if value is not None}
    honoured = frozenset(kind.model_fields)
    unknown = unknown_fields(given, honoured, kind.RULES, prefix)
    known = {name: value for name, value in given.items() if name in honoured}
    for name, nested in kind.NESTED.items():
        if isinstance(inner := known.get(name), dict):
            known[name], names = _check(inner, nested, f"{prefix}{name}.")
            unknown += names
    return known, unknown


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
