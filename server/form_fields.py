"""The fields of OpenAI, vLLM and llama.cpp that ask for an answer of a given form.

Owns: their shapes, and that a request has at most one of them. Must not know: what becomes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..runtime.errors import RequestError
from .asking import Asked
from .structured import Form

MAX_CHOICES = 1000
FORM_FIELDS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
)
"""Beside response_format."""


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema: an object, true or false")
    return value


def _choices(value: Any) -> Any:
    is_list = isinstance(value, list) and all(isinstance(choice, str) for choice in value)
    if not is_list or not 0 < len(value) <= MAX_CHOICES or "" in value:
        raise ValueError(f"must be a list of 1 to {MAX_CHOICES} strings that are not empty")
    return value


Schema: TypeAlias = Annotated[
    Any, BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | bool)
]
Choices: TypeAlias = Annotated[Any, BeforeValidator(_choices, json_schema_input_type=list[str])]


class Exact(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NamedSchema(Exact):
    """OpenAI's frame around a schema. It is enforced whether `strict` says so or not."""

    name: str = "answer"
    description: str | None = None
    schema_: Schema = Field(default=True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Exact):
    """`schema` at this level is llama.cpp's way to write it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        given = (self.json_schema is not None) + (self.schema_ is not None)
        most = {"text": 0, "json_object": self.schema_ is not None, "json_schema": 1}[self.type]
        if given != most:
            needs = "needs one" if self.type == "json_schema" else "takes no"
            raise ValueError(f"type {self.type} {needs} json_schema")
        return self

    def form(self, field: str) -> Form | None:
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return Form("json", self.json_schema.schema_, f"{field}.json_schema.schema")
        if self.schema_ is not None:
            return Form("json", self.schema_, f"{field}.schema")
        return Form("json", {"type": "object"}, field)


class TextFormat(Exact):
    """Of /v1/responses: OpenAI's schema without the frame."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("a schema belongs to type json_schema, and json_schema needs one")
        return self

    def form(self, field: str) -> Form | None:
        if self.type == "text":
            return None
        if self.schema_ is None:
            return Form("json", {"type": "object"}, field)
        return Form("json", self.schema_, f"{field}.schema")


class StructuredOutputs(Exact):
    """vLLM's newer fields."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def forms(self, field: str) -> list[Form]:
        given: list[tuple[Any, Any]] = [
            ("json", self.json_),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
        ]
        forms = [Form(kind, value, f"{field}.{kind}") for kind, value in given if value is not None]
        is_any = [Form("json", {"type": "object"}, f"{field}.json_object")]
        return forms + (is_any if self.json_object else [])


class FormFields(Asked):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Schema | None = None

    FORMS: ClassVar[Mapping[str, Any]] = {
        "guided_json": "json",
        "guided_regex": "regex",
        "guided_choice": "choice",
        "guided_grammar": "grammar",
        "grammar": "grammar",
        "json_schema": "json",
    }

    @property
    def form(self) -> Form | None:
        format_ = self.response_format and self.response_format.form("response_format")
        forms = [format_] if format_ else []
        if self.structured_outputs:
            forms += self.structured_outputs.forms("structured_outputs")
        given = {name: getattr(self, name) for name in self.FORMS}
        # llama.cpp's clients send these two empty when they want none.
        nothing: Mapping[str, Any] = {"grammar": "", "json_schema": {}}
        forms += [
            Form(self.FORMS[name], value, name)
            for name, value in given.items()
            if value is not None and value != nothing.get(name)
        ]
        return one_form(forms)


def one_form(forms: Sequence[Form]) -> Form | None:
    """Raises RequestError for several."""
    if len(forms) > 1:
        raise RequestError(
            f"{forms[1].field}: {forms[0].field} gives the answer's form already; leave one out",
            field=forms[1].field,
        )
    return forms[0] if forms else None
