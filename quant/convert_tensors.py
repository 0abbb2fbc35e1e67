"""Which tensors a GGUF file gets from which tensors of a checkpoint, in which order of rows.

Owns: names in either world, fused and tied tensors, and
the check that nothing is missing or left over. Must not know: config.json, formats, files.
Weights are read as float32 rows when they are written, never all at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import gguf
import numpy as np

from .convert_config import Settings
from .convert_expected import EMBEDDING, FUSED, HEAD, expected
from .convert_experts import Source as Stored
from .convert_experts import stacked
from .convert_family import Family, Nextn
from .convert_latent import HeadRows, split_heads
from .convert_nextn import first_layers, own_name, placed, shared_tables
from .convert_recurrent import NO_CHANGE, Change
from .convert_turns import is_packed, unstacked
from .errors import FileFormatError, UnsupportedError
from .safetensors_file import SourceTensor

_COMPARE_ROWS = 4096
Source = Stored | HeadRows
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# How classes around a language model call it. The first that fits is replaced.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("bert.", ""),
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
# Buffers that follow from the config, and the parts of a model that is not only for text.
_IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq|.*\.self_attn\.(bias|masked_bias)"
    r"|(bert\.)?embeddings\.position_ids"
    r"|(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision|embed_audio|audio_tower)\..*"
)
# What BERT was trained with, and vectors are not made of.
_POOLER = re.compile(r"(bert\.)?pooler\..*")


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of the file to be written: rows of a stored tensor, or values that are given."""

    name: str
    shape: tuple[int, ...]
    source: Source | None = None
    first: int = 0  # row of the source that is row 0 here, where several are stacked there
    heads: int = 0  # > 0: rows of each head change from halves to pairs
    offset: float = 0.0
    change: Change = NO_CHANGE
    values: np.ndarray | None = field(default=None, repr=False)

    @property
    def n_rows(self) -> int:
        """Of a vector its values, of a stack of matrices the rows of all."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32 (stop - start, cols) of a matrix, (stop - start,) of a vector."""
        if self.source is None:
            assert self.values is not None
            return self.values[start:stop]
        if len(self.shape) > 1 and len(self.source.shape) == 1:  # a vector, in rows
            start, stop = start * self.shape[-1], stop * self.shape[-1]
        index: slice | np.ndarray = slice(self.first + start, self.first + stop)
        if self.heads:
            index = self.first + halves_to_pairs(np.arange(start, stop), self.n_rows // self.heads)
        if self.change.rows is not None:
            index = self.first + self.change.rows[start:stop]
        rows = self.source.rows(index)
        if self.change.values:
            rows = self.change.values(rows)
        if np.any(self.change.scale != 1):
            scale = np.asarray(self.change.scale, np.float32)
            rows = rows * (scale[start:stop] if scale.ndim else scale)
        if self.change.cols is not None:
            rows = rows[:, self.change.cols]
        if self.offset:  # adding 0 would turn -0 to 0
            rows += np.float32(self.offset)
        return rows.reshape(-1, *self.shape[1:][-1:])


def halves_to_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where each row comes from: row 2i of a head is its row i, row 2i + 1 its row i + head_dim/2.

    Rope as Llama's checkpoints have it turns dims (i, i + head_dim / 2), as GGUF's has it
    (2i, 2i + 1)."""
    head, row = np.divmod(rows, head_dim)
    pair, side = np.divmod(row, 2)
    return head * head_dim + side * (head_dim // 2) + pair


def plan_weights(settings: Settings, tensors: Mapping[str, SourceTensor]) -> list[Weight]:
    """Every tensor of the GGUF file; raises where the checkpoint is not exactly as expected."""
    canonical = _of_layers(settings, _canonical(tensors, settings.family))
    stored = unstacked(canonical) if _takes_turns(settings.family) else stacked(canonical)
    named: dict[str, Source] = {**stored}
    if settings.latent:
        named = split_heads(stored, settings.latent)
    embedding = named.get(f"{EMBEDDING}.weight")
    if embedding is None:
        raise FileFormatError(f"tensor '{EMBEDDING}.weight' is missing from the checkpoint")
    _drop_tied_head(settings, named)
    _drop_shared_tables(named)
    wanted = expected(settings, embedding.n_rows, named)
    parts = _unfuse(settings, named, wanted)
    for name, shape in wanted.items():
        if name not in parts:
            raise FileFormatError(
                f"tensor {name!r} of shape {shape} is missing from the checkpoint"
            )
        found = parts[name][2]
        if len(shape) == 1 and found == (1, *shape):  # a vector, kept as a matrix of one row
            found = shape
            parts[name] = (*parts[name][:2], shape)
        if found != shape:
            raise FileFormatError(
                f"tensor {name!r} has shape {found}, config.json asks for {shape}"
            )
    for name in parts:
        if name not in wanted:
            raise UnsupportedError(
                f"tensor {name!r} has no place in a {settings.family.arch} model of this config"
            )
    names = tensor_names(settings)
    weights = [weight_of(settings, name, names, *parts[name]) for name in wanted]
    ropes = [Weight(n, values.shape, values=values) for n, values in settings.rope.tensors.items()]
    return [weights[0], *ropes, *weights[1:]]


def _takes_turns(family: Family) -> bool:
    return family.experts is not None and family.experts.takes_turns


def ignored_tensors(tensors: Mapping[str, SourceTensor]) -> list[str]:
    """What is left out without harm to a model of text."""
    return [name for name in tensors if _IGNORED.fullmatch(name)]


def _of_layers(settings: Settings, named: dict[str, SourceTensor]) -> dict[str, SourceTensor]:
    """With as many of the blocks behind the last layer as are to be written."""
    if settings.family.nextn is Nextn.NEVER:
        return named
    return first_layers(placed(named, settings.n_layers), settings.n_blocks)


def _canonical(tensors: Mapping[str, SourceTensor], family: Family) -> dict[str, SourceTensor]:
    """Tensors under the names that a plain causal model gives them."""
    named: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        if _IGNORED.fullmatch(name) or (not family.classifier and _POOLER.fullmatch(name)):
            continue
        if not (_takes_turns(family) and is_packed(name)):
            tensor.check_convertible()
        name = canonical(name, family)
        if name in named:
            raise FileFormatError(f"tensors {tensor.name!r} and {named[name].name!r} are one")
        named[name] = tensor
    return named


def canonical(name: str, family: Family) -> str:
    """What a plain causal model calls a tensor."""
    prefix, plain = next((p for p in _PREFIXES if name.startswith(p[0])), ("", ""))
    return family.renamed(plain + name.removeprefix(prefix))


def _drop_tied_head(settings: Settings, named: dict[str, Source]) -> None:
    """A head that repeats the embedding goes. One that differs contradicts the config, and
    which of the two was meant cannot be known."""
    name = f"{HEAD}.weight"
    if not settings.is_tied or name not in named:
        return
    if not _are_equal(named[name], named[f"{EMBEDDING}.weight"]):
        raise FileFormatError(
            f"tie_word_embeddings is true, but {name!r} differs from the embedding; set the flag "
            "to false in config.json, or remove the tensor"
        )
    del named[name]


def _drop_shared_tables(named: dict[str, Source]) -> None:
    """Blocks that predict further tokens may repeat the model's own; readers then take those."""
    embedding = named[f"{EMBEDDING}.weight"]
    for name, is_head in shared_tables(named):
        own = named.get(f"{HEAD}.weight", embedding) if is_head else embedding
        if _are_equal(named[name], own):
            del named[name]


def _are_equal(a: Source, b: Source) -> bool:
    if a.shape != b.shape:
        return False
    pieces = (slice(at, at + _COMPARE_ROWS) for at in range(0, a.n_rows, _COMPARE_ROWS))
    return all(np.array_equal(a.rows(piece), b.rows(piece)) for piece in pieces)


_Part = tuple[Source, int, tuple[int, ...]]  # (stored in, first row there, shape)


def _unfuse(
    settings: Settings, named: Mapping[str, Source], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for name, tensor in named.items():
        shares, in_turn = shares_of(settings, name)
        if not shares:
            parts[name] = (tensor, 0, tensor.matrix_shape)
            continue
        heights = [wanted[share][0] for share in shares if share in wanted]
        if len(heights) != len(shares) or sum(heights) != tensor.n_rows:
            raise FileFormatError(
                f"tensor {name!r} has {tensor.n_rows} rows, its parts take {sum(heights)}"
            )
        first = 0
        for share, height in zip(shares, heights, strict=True):
            if share in named:
                raise FileFormatError(f"tensors {name!r} and {share!r} are both in the checkpoint")
            parts[share] = (tensor, first, (height, *tensor.shape[1:]))
            first += 0 if in_turn else height
    return parts


def shares_of(settings: Settings, name: str) -> tuple[list[str], bool]:
    """What a fused tensor is made of, and whether rows of one and another stand in turn, so that
    each share's change says which are its own."""
    for fused, parts in FUSED.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(f".{fused}") and fused not in settings.family.keeps_fused:
            return [f"{stem.removesuffix(fused)}{part}.{kind}" for part in parts], False
    within = _LAYER.sub("", name)
    mixed = settings.recurrence.mixed.get(within, ()) if settings.recurrence else ()
    return [f"{name.removesuffix(within)}{part}" for part in mixed], True


def tensor_names(settings: Settings) -> gguf.TensorNameMap:
    arch = settings.family.arch
    id_ = next(id_ for id_, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    return gguf.get_tensor_name_map(id_, settings.n_blocks)


def _own_name(family: Family, name: str) -> str | None:
    match = _LAYER.match(name)
    rest, layer = name[match.end() if match else 0 :], f"blk.{match[1]}." if match else ""
    if rest in family.own_names:
        return f"{layer}{family.own_names[rest]}"
    part, _, kind = rest.rpartition(".")
    if part not in family.own_names:
        return None
    return f"{layer}{family.own_names[part]}.{kind}"


def weight_of(
    settings: Settings,
    name: str,
    names: gguf.TensorNameMap,
    source: Source,
    first: int,
    shape: Sequence[int],
) -> Weight:
    """The tensor of the file that a canonical name stands for."""
    stem = name.replace("e_score_correction_bias", "e_score_correction.bias")
    new_name = own_name(name) or _own_name(settings.family, name)
    new_name = new_name or names.get_name(stem, try_suffixes=(".weight", ".bias"))
    if new_name is None:
        raise UnsupportedError(f"tensor {name!r} has no name in a {settings.family.arch} file")
    heads = 0
    if settings.family.rope_pairs and ".self_attn.q_proj." in name:
        heads = settings.heads
    if settings.family.rope_pairs and ".self_attn.k_proj." in name:
        heads = settings.kv_heads
    is_offset = name.endswith("norm.weight") and ".linear_attn." not in name
    offset = settings.family.norm_offset if is_offset else 0.0
    change = NO_CHANGE
    if settings.recurrence:
        change = settings.recurrence.changes.get(_LAYER.sub("", name), NO_CHANGE)
    return Weight(new_name, change.shape or tuple(shape), source, first, heads, offset, change)
