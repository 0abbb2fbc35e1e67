"""Which request fields are not obeyed, and why: the two tables behind "honoured or refused".

Owns: FieldRules and OpenAI's: REFUSED (asking for it is a 400 that names the field) and NO_EFFECT
(bookkeeping that cannot change the answer). Must not know: the fields that are honoured
(schema.py), other dialects' tables (beside their fields) or HTTP.

A field that stands in neither table nor in the schema is unknown: it is reported in the
`x-martlet-ignored` header, or refused when the server runs strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import refused


class Refused(NamedTuple):
    """A field with an effect we do not have. Its neutral values ask for nothing, so they pass."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class FieldRules:
    """What one kind of object says to fields that are not honoured."""

    refused: Mapping[str, Refused] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()


CHAT_ONLY = "belongs to /v1/chat/completions"
SAMPLER = "this sampler is not implemented"
MEDIA = "only text goes in and comes out"
ELSEWHERE = "vLLM and llama.cpp extension without a counterpart here"

REFUSED: Mapping[str, Refused] = {
    "tools": Refused(CHAT_ONLY, ([],)),
    "tool_choice": Refused(CHAT_ONLY, ("none", "auto")),
    "parallel_tool_calls": Refused(CHAT_ONLY, (True, False)),
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice", ("none", "auto")),
    "reasoning": Refused("use reasoning_effort"),
    "reasoning_effort": Refused(CHAT_ONLY, ("none",)),
    "reasoning_format": Refused(CHAT_ONLY, ("none",)),
    "include_reasoning": Refused("reasoning is always shown, apart from the answer", (True,)),
    "thinking": Refused("use reasoning_effort"),
    "chat_template": Refused("the template is chosen when the server starts"),
    "chat_template_kwargs": Refused(CHAT_ONLY, ({},)),
    "documents": Refused("no template here reads documents", ([],)),
    "continue_final_message": Refused(CHAT_ONLY, (False,)),
    "verbosity": Refused("no model here is trained for it", ("medium",)),
    "guided_decoding_backend": Refused("there is one: llguidance", ("auto", "guidance")),
    "guided_whitespace_pattern": Refused("between tokens of JSON a bounded space is allowed"),
    "structural_tag": Refused("use response_format, tools or guided_grammar"),
    "audio": Refused(MEDIA),
    "modalities": Refused(MEDIA, (["text"],)),
    "web_search_options": Refused("the server reaches no network"),
    "moderation": Refused("there is no moderation here"),
    "messages": Refused(CHAT_ONLY),
    "prompt": Refused("belongs to /v1/completions"),
    "echo": Refused("belongs to /v1/completions", (False,)),
    "top_logprobs": Refused("belongs to /v1/chat/completions; here logprobs is the number"),
    "best_of": Refused("belongs to /v1/completions; use n", (1,)),
    "suffix": Refused("belongs to /v1/completions", ("",)),
    "use_beam_search": Refused(SAMPLER, (False,)),
    "length_penalty": Refused(SAMPLER, (1, 1.0)),
    "typical_p": Refused(SAMPLER, (1, 1.0)),
    "tfs_z": Refused(SAMPLER, (1, 1.0)),
    "top_a": Refused(SAMPLER, (0,)),
    "mirostat": Refused(SAMPLER, (0,)),
    "dry_multiplier": Refused(SAMPLER, (0,)),
    "xtc_probability": Refused(SAMPLER, (0,)),
    "dynatemp_range": Refused(SAMPLER, (0,)),
    "repeat_penalty": Refused("use repetition_penalty", (1, 1.0)),
    "n_predict": Refused("use max_tokens"),
    "max_length": Refused("use max_tokens"),
    "n_probs": Refused("use logprobs", (0,)),
    "prompt_logprobs": Refused("belongs to /v1/completions and /v1/chat/completions"),
    "stop_sequences": Refused("use stop", ([],)),
    "bad_words": Refused("use logit_bias", ([],)),
    "include_stop_str_in_output": Refused("stop text is never returned", (False,)),
    "skip_special_tokens": Refused("control tokens are never shown as text", (True,)),
    "add_special_tokens": Refused("the model's own rule is used", (True,)),
    "return_tokens_as_token_ids": Refused(ELSEWHERE, (False,)),
    "prompt_embeds": Refused(MEDIA),
    "logits_processors": Refused(ELSEWHERE, ([],)),
    "priority": Refused("use service_tier: flex goes behind the others", (0,)),
}

NO_EFFECT: frozenset[str] = frozenset(
    {
        "cache_prompt",  # the prefix cache never changes an answer, so it is simply on
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)


OPENAI = FieldRules(REFUSED, NO_EFFECT)


def unknown_fields(
    given: Mapping[str, Any], honoured: frozenset[str], rules: FieldRules, prefix: str = ""
) -> list[str]:
    """Names nobody knows. Raises ApiError 400 for a field that is known and cannot be obeyed."""
    unknown = []
    for name, value in given.items():
        if name in honoured or name in rules.no_effect:
            continue
        rule = rules.refused.get(name)
        if rule is None:
            unknown.append(prefix + name)
        elif not any(_is_same(value, neutral) for neutral in rule.neutral):
            full = prefix + name
            raise refused(f"{full}: {rule.reason}", param=full, code="unsupported_parameter")
    return unknown


def _is_same(value: Any, neutral: Any) -> bool:
    """1 and 1.0 are the same number; to Python true is 1 as well, and here it is a mistake."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
