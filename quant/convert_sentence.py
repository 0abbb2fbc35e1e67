"""What stands around an encoder in the folders of sentence-transformers: pooling, dense layers.

Owns: modules.json and the folders it names. Must not know: the encoder, GGUF files. Names are those
of sentence-transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import SINGLE, Checkpoint
from .errors import FileFormatError, UnsupportedError
from .safetensors_file import SafetensorsFile, SourceTensor, parse_json

MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # as GGUF files number them
_MODES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
_FLAGS = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
}
_MOST_DENSE = 2


@dataclass(frozen=True)
class Sentence:
    pooling_type: int | None = None  # None: the folder does not say
    dense: tuple[SourceTensor, ...] = ()
    """Products behind the pooling, in their order."""
    labels: tuple[int, ...] = ()
    """Tokens, yes and no, whose logits are the scores of a text."""


def read_sentence(checkpoint: Checkpoint) -> Sentence:
    """Raises UnsupportedError for what is not computed behind an encoder."""
    raw = checkpoint.raw("modules.json")
    modules = parse_json(raw, "modules.json:") if raw else []
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise FileFormatError("modules.json: is not a list of modules")
    pooling, dense, labels = None, list[SourceTensor](), tuple[int, ...]()
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind in ("Transformer", "Normalize"):  # vectors are given at length 1 in any case
            continue
        folder = checkpoint.folder / _plain(module.get("path"))
        config = Checkpoint(folder, {}, ()).json("config.json")
        if kind == "Pooling":
            pooling = _pooling_type(config)
        elif kind == "LogitScore":
            pooling, labels = RANK, _labels(config)
        elif kind == "Dense":
            dense.append(_dense(folder, config))
        else:
            raise UnsupportedError(f"modules.json: a module {kind!r} is not supported")
    if len(dense) > _MOST_DENSE:
        raise UnsupportedError(f"modules.json: {len(dense)} dense layers, at most {_MOST_DENSE}")
    if dense and pooling != MEAN:
        raise UnsupportedError("modules.json: dense layers are supported behind a mean only")
    return Sentence(pooling, tuple(dense), labels)


def _labels(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [config.get(f"{answer}_token_id") for answer in ("true", "false")]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
        raise UnsupportedError(f"the tokens {ids} of yes and no are not supported; both are needed")
    return tuple(int(id_) for id_ in ids if id_ is not None)


def _plain(path: Any) -> str:
    if not isinstance(path, str) or Path(path).name != path:
        raise FileFormatError(f"modules.json: the path {path!r:.80} is not the name of a folder")
    return path


def _pooling_type(config: Mapping[str, Any]) -> int:
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else []
    found = [_MODES.get(name, 0) for name in modes]
    found += [kind for flag, kind in _FLAGS.items() if config.get(flag)]
    others = [k for k, v in config.items() if k.startswith("pooling_mode_") and v is True]
    if len(found) != 1 or not found[0] or any(key not in _FLAGS for key in others):
        named = modes or others
        raise UnsupportedError(
            f"the pooling {named} is not supported, only one of {', '.join(_MODES)}"
        )
    return found[0]


def _dense(folder: Path, config: Mapping[str, Any]) -> SourceTensor:
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if activation != "Identity" or config.get("bias"):
        raise UnsupportedError(
            f"{folder.name}: a dense layer with bias {config.get('bias')} and activation "
            f"{activation} is not supported"
        )
    if not (folder / SINGLE).is_file():
        raise FileFormatError(f"{folder}: has no {SINGLE}; fetch it too")
    tensors = SafetensorsFile.open(folder / SINGLE).tensors
    if set(tensors) != {"linear.weight"}:
        raise UnsupportedError(f"{folder.name}: holds {sorted(tensors)[:4]}, not linear.weight")
    tensors["linear.weight"].check_convertible()
    return tensors["linear.weight"]
