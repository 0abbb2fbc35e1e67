"""All that a GGUF file says about text: tokens, their roles, chat templates, sampling defaults.

Owns: which file of a checkpoint decides on a role, every end token, whether BOS is added. Must not
know: how the token list is read (convert_vocab.py), tensors, config sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .convert_pretokenizer import PreTokenizerForm
from .convert_vocab import VocabTable, read_vocab
from .errors import FileFormatError, UnsupportedError
from .gguf_field import INT32, Field

# Role in GGUF -> role in the checkpoint's files. "seperator" is spelt so in the format.
_ROLES = {
    "bos": "bos",
    "unknown": "unk",
    "seperator": "sep",
    "padding": "pad",
    "mask": "mask",
    "cls": "cls",
}
_END_ROLES = ("eos", "eot", "eom")
# Texts by which the models that can fill a gap name its sides.
_GAP_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>"),
    "fim_suf": ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>"),
    "fim_mid": ("<|fim_middle|>", "<fim_middle>", "<fim-middle>"),
}
# Classes that add BOS themselves where the files do not say.
_ADDS_BOS = ("LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast")
# Sampling defaults: key here -> (key there, stored as).
_SAMPLING = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}
_MAX_TEMPLATE_CHARS = 1_000_000
_MAX_SAMPLING = 2**31 - 1  # what is larger is no setting, as NaN is none


@dataclass(frozen=True)
class ReaderFacts:
    """What readers of GGUF files know by themselves."""

    pre_tokenizers: Mapping[str, PreTokenizerForm]  # by value of tokenizer.ggml.pre
    end_texts: frozenset[str]  # control tokens of these texts end a generation without a role


@dataclass(frozen=True)
class ConvertedTokenizer:
    metadata: dict[str, Any]
    notes: list[str]  # what a person should know


def convert_tokenizer(
    checkpoint: Checkpoint, config: Mapping[str, Any], n_rows: int, facts: ReaderFacts
) -> ConvertedTokenizer:
    """`config`: config.json; `n_rows`: rows of the embedding."""
    table = read_vocab(checkpoint, n_rows, facts.pre_tokenizers)
    files = _RoleFiles(checkpoint, config, table)
    metadata = table.metadata()
    for role, theirs in _ROLES.items():
        if (id_ := files.role(theirs)) is not None:
            metadata[f"tokenizer.ggml.{role}_token_id"] = id_
    metadata |= _ends(files, facts)
    for role, texts in _GAP_TEXTS.items():
        if (id_ := next((files.ids[t] for t in texts if t in files.ids), None)) is not None:
            metadata[f"tokenizer.ggml.{role}_token_id"] = id_
    metadata |= _additions(checkpoint, table, files)
    metadata |= _chat_templates(checkpoint)
    return ConvertedTokenizer({**metadata, **_sampling(files.generation)}, table.notes)


class _RoleFiles:
    """Who has which role, from tokenizer_config, special_tokens_map, config and generation."""

    def __init__(
        self, checkpoint: Checkpoint, config: Mapping[str, Any], table: VocabTable
    ) -> None:
        self.tokenizer_config = checkpoint.json("tokenizer_config.json")
        self.generation = checkpoint.json("generation_config.json")
        self.ids: dict[str, int] = {}
        for id_, text in enumerate(table.texts):
            self.ids.setdefault(text, id_)
        self.texts = table.texts
        self._texts = (self.tokenizer_config, checkpoint.json("special_tokens_map.json"))
        inner = config.get("text_config")
        self._numbers: tuple[Mapping[str, Any], ...] = (
            self.generation,
            config,
            inner if isinstance(inner, dict) else {},
        )

    def role(self, role: str) -> int | None:
        return next(self.candidates(role), None)

    def candidates(self, role: str) -> Iterator[int]:
        """Every id that the role has for the tokenizer, then those it has for the model: of
        generation_config.json, and only where that is silent of config.json, whose value may be
        its class's default."""
        for file in self._texts:
            entry = file.get(f"{role}_token")
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str) and text in self.ids:
                yield self.ids[text]
        for numbers in self._numbers:
            value = numbers.get(f"{role}_token_id")
            ids = value if isinstance(value, list) else [value]
            if named := [self._checked(role, id_) for id_ in ids if id_ not in (None, -1)]:
                yield from named
                return

    def _checked(self, role: str, id_: Any) -> int:
        if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < len(self.texts):
            raise FileFormatError(
                f"{role}_token_id is {id_!r}, but there are {len(self.texts)} tokens"
            )
        return id_


def _ends(files: _RoleFiles, facts: ReaderFacts) -> dict[str, int]:
    """Every end token that any file names. GGUF has roles for three; what readers know by its text
    gives way to others, and what is left over is refused rather than never stopped at."""
    ends = list(dict.fromkeys(files.candidates("eos")))
    if not ends:
        return {}
    first, *others = ends
    others.sort(key=lambda id_: files.texts[id_] in facts.end_texts)
    with_role = dict(zip(_END_ROLES, [first, *others], strict=False))
    lost = [i for i in others[len(_END_ROLES) - 1 :] if files.texts[i] not in facts.end_texts]
    if lost:
        raise UnsupportedError(
            f"{len(ends)} tokens end a generation, GGUF has roles for {len(_END_ROLES)}; "
            f"leave in generation_config.json what is needed of {[files.texts[i] for i in ends]}"
        )
    return {f"tokenizer.ggml.{role}_token_id": id_ for role, id_ in with_role.items()}


def _additions(checkpoint: Checkpoint, table: VocabTable, files: _RoleFiles) -> dict[str, bool]:
    """Whether BOS and EOS are put around a text: as tokenizer.json's post-processor does it, else
    as tokenizer_config says, else as the tokenizer's class does."""
    if table.model == "bert":  # [CLS] and [SEP] stand around every text
        return {}
    bos, eos = files.role("bos"), files.role("eos")
    around = _template_ends(checkpoint.json("tokenizer.json").get("post_processor"))
    config = files.tokenizer_config
    class_adds = table.model == "llama" and config.get("tokenizer_class") in (*_ADDS_BOS, None)
    adds_bos = bool(config.get("add_bos_token", class_adds))
    adds_eos = bool(config.get("add_eos_token", False))
    if around is not None:
        adds_bos, adds_eos = (
            text is not None and files.ids.get(text) == id_
            for text, id_ in zip(around, (bos, eos), strict=True)
        )
    return {
        "tokenizer.ggml.add_bos_token": adds_bos and bos is not None,
        "tokenizer.ggml.add_eos_token": adds_eos and eos is not None,
    }


def _template_ends(node: Any) -> tuple[str | None, str | None] | None:
    """The special tokens before and behind the text; None where no template says."""
    if not isinstance(node, dict):
        return None
    if node.get("type") == "Sequence" and isinstance(node.get("processors"), list):
        return next(filter(None, map(_template_ends, node["processors"])), None)
    if node.get("type") != "TemplateProcessing" or not isinstance(node.get("single"), list):
        return None
    names: list[str | None] = []
    for item in node["single"]:
        special = item.get("SpecialToken") if isinstance(item, dict) else None
        name = special.get("id") if isinstance(special, dict) else None
        names.append(name if isinstance(name, str) else None)
    if not names:
        return None, None
    return names[0], names[-1] if len(names) > 1 else None


def _chat_templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """As in transformers, files of their own go before what tokenizer_config.json says."""
    templates: dict[str, str] = {}
    for config in ("chat_template.json", "tokenizer_config.json"):
        given = checkpoint.json(config).get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates |= {
                entry["name"]: entry["template"]
                for entry in given
                if isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            }
    if (text := checkpoint.text("chat_template.jinja")) is not None:
        templates["default"] = text
    for path in sorted((checkpoint.folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = checkpoint.text(f"additional_chat_templates/{path.name}") or ""
    for name, text in templates.items():
        if len(text) > _MAX_TEMPLATE_CHARS:
            raise FileFormatError(
                f"chat template {name!r} has {len(text)} characters, at most {_MAX_TEMPLATE_CHARS}"
            )
    metadata: dict[str, Any] = {}
    if "default" in templates:
        metadata["tokenizer.chat_template"] = templates.pop("default")
    for name, text in templates.items():
        metadata[f"tokenizer.chat_template.{name}"] = text
    if templates:
        metadata["tokenizer.chat_templates"] = list(templates)
    return metadata


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that the makers recommend; greedy models say nothing of them."""
    if not generation.get("do_sample"):
        return {}
    found: dict[str, Any] = {}
    for key, (name, kind) in _SAMPLING.items():
        value = generation.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if abs(value) <= _MAX_SAMPLING:
            number = kind(value)
            found[f"general.sampling.{name}"] = (
                Field.number(number, INT32) if kind is int else float(number)
            )
    return found
