"""Requests for an answer of a given form: JSON, a regular expression, choices, a grammar.

Owns: Form, and where it begins in an answer that may reason first. Must not know: which fields ask
for it (form_fields.py), how grammars are compiled or applied, HTTP.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ..runtime import grammar


class Form(NamedTuple):
    """What an answer must look like."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    """A schema, a pattern, strings, the text of a grammar."""
    field: str
    """The request's name for it, for whoever has to correct it."""

    def term(self, grammars: grammar.Grammars) -> str:
        """The form as Lark. Raises RequestError."""
        if self.kind == "json":
            grammar.check_schema(self.value, field=self.field)
            return grammar.json_value(self.value)
        if self.kind == "regex":
            grammar.check_patterns([self.value], field=self.field)
            return grammar.regex_term(self.value)
        if self.kind == "choice":
            return "(" + " | ".join(map(grammar.literal, self.value)) + ")"
        return "%lark {\n" + grammars.lark(self.value, field=self.field) + "\n}"


def compiled(grammars: grammar.Grammars, form: Form, *, may_think: bool | None) -> grammar.Grammar:
    """may_think: None where the answer has no reasoning apart; True: it begins within it.

    Raises RequestError naming the field.
    """
    answer = f"answer: {form.term(grammars)}\n"
    # The form by itself as well: what is wrong with it may show only at its place.
    alone = grammars.compile(thinking_first(None) + answer, field=form.field)
    if may_think is None:
        return alone
    return grammars.compile(thinking_first(may_think) + answer, field=form.field)


def thinking_first(begins_inside: bool | None) -> str:
    """Lark whose `start` is reasoning, where there may be some, and then `answer`."""
    if begins_inside is None:
        return "start: answer\n"
    # What the reasoning says is free, up to the first closing tag.
    opening = "" if begins_inside else r"[ \n]*<think>"
    return (
        f"start: thinking{'' if begins_inside else '?'} GAP? answer\n"
        f"thinking[lazy]: /{opening}(.|\\n)*<\\/think>/\n"
        "GAP: /[ \\n]{1,4}/\n"
    )
