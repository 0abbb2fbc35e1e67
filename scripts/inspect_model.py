"""`martlet inspect`: what is in a model file, without loading it.
Owns the summary and its two forms; must not know how the file is parsed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from martlet.scripts import options
from martlet.scripts.console import CONTROLS, byte_progress, plain_console, print_json
from martlet.scripts.models import find_model

if TYPE_CHECKING:
    from martlet.quant.gguf_file import GGUFFile, GGUFTensor
    from martlet.runtime.config import LayerConfig

KV_VALUE_BYTES = 2  # the cache holds float16
EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.")
STATE_VALUE_BYTES = 4
SHOWN_ITEMS = 8
SHOWN_CHARS = 100


def inspect(model: options.ModelArgument, as_json: options.JsonOption = False) -> None:
    """Show architecture, sizes, tensor types and metadata of MODEL."""
    from martlet.quant.gguf_file import GGUFFile

    with byte_progress() as progress:
        path = find_model(model, progress=progress)
    with GGUFFile.open(path) as file:
        summary = summarize(file)
    print_json(summary) if as_json else show(summary)


def summarize(file: GGUFFile) -> dict[str, Any]:
    tensors = list(file.tensors.values())
    return {
        "path": str(file.path),
        "file_bytes": file.n_bytes,
        "gguf_version": file.version,
        "model": model_summary(file),
        "weights": weights_summary(tensors),
        "types": types_summary(tensors),
        "metadata": {key: plain(value) for key, value in file.metadata.items()},
        "tensors": [
            {"name": t.name, "type": t.format.name, "shape": list(t.shape), "bytes": t.n_bytes}
            for t in tensors
        ],
    }


def weights_summary(tensors: Iterable[GGUFTensor]) -> dict[str, Any]:
    sizes = [(t.n_weights, t.n_bytes) for t in tensors]
    n_weights, n_bytes = sum(n for n, _ in sizes), sum(b for _, b in sizes)
    bits = 8 * n_bytes / n_weights if n_weights else 0.0
    return {"tensors": len(sizes), "weights": n_weights, "bytes": n_bytes, "bits_per_weight": bits}


def types_summary(tensors: list[GGUFTensor]) -> dict[str, dict[str, Any]]:
    """Largest share of the bytes first."""
    names = {t.format.name for t in tensors}
    types = {name: weights_summary(t for t in tensors if t.format.name == name) for name in names}
    return dict(sorted(types.items(), key=lambda item: (-item[1]["bytes"], item[0])))


def model_summary(file: GGUFFile) -> dict[str, Any]:
    """The shape of the model; for one martlet cannot run, why not."""
    from martlet.quant.errors import MartletError
    from martlet.runtime.architectures import ARCHITECTURES
    from martlet.runtime.config import ModelConfig

    try:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        config = ModelConfig.from_metadata(file.metadata, shapes)
    except MartletError as error:
        arch = file.metadata.get("general.architecture")
        return {"architecture": arch, "supported": False, "reason": str(error)}
    layers = [layer for layer in config.layers if layer.kv_heads]
    n_recurrent = sum(layer.is_recurrent for layer in config.layers)
    state_values = config.recurrence.state_values(config.dim)
    return {
        "architecture": config.arch,
        "supported": True,
        "name": config.name,
        "layers": config.n_layers,
        "dim": config.dim,
        "ffn_dim": spread(layer.ffn_dim for layer in config.layers),
        "vocab_size": config.vocab_size,
        "context_train": config.context_train,
        "attention": attention_kind(layers),
        "heads": spread(layer.heads for layer in layers),
        "kv_heads": spread(layer.kv_heads for layer in layers),
        "head_dim": spread(layer.head_dim for layer in layers),
        "window_layers": sum(layer.window > 0 for layer in layers),
        "window": max((layer.window for layer in layers), default=0),
        "kv_bytes_per_token": kv_bytes_per_token(layers),
        "experts": experts_summary(file, config.layers),
        "attention_layers": len(layers),
        "recurrent_layers": n_recurrent,
        "recurrence": ARCHITECTURES[config.arch].recurrence,
        "state_bytes": n_recurrent * state_values * STATE_VALUE_BYTES,
        "chat_template": "tokenizer.chat_template" in file.metadata,
    }


def experts_summary(file: GGUFFile, layers: Sequence[LayerConfig]) -> dict[str, Any] | None:
    """How many experts there are and a token uses, and the weights that it meets at most."""
    found = [layer.experts for layer in layers if layer.experts]
    if not found:
        return None
    active = 0
    for tensor in file.tensors.values():
        match = EXPERT_TENSOR.match(tensor.name)
        experts = layers[int(match[1])].experts if match and int(match[1]) < len(layers) else None
        share = experts.used / experts.count if experts else 1.0
        active += round(tensor.n_weights * share)
    return {
        "layers": len(found),
        "count": spread(experts.count for experts in found),
        "used": spread(experts.used for experts in found),
        "weights_active": active,
    }


def attention_kind(layers: Iterable[LayerConfig]) -> str:
    """MHA: as many key/value heads as query heads; MQA: one; GQA: in between (or a mixture); MLA:
    one, compressed, whose values are a part of it."""
    kinds = {
        "MLA"
        if layer.latent
        else "MHA"
        if layer.kv_heads == layer.heads
        else "MQA"
        if layer.kv_heads == 1
        else "GQA"
        for layer in layers
    }
    return kinds.pop() if len(kinds) == 1 else "mixed"


def kv_bytes_per_token(layers: Iterable[LayerConfig]) -> int:
    return sum(layer.kv_values * KV_VALUE_BYTES for layer in layers)


def spread(values: Iterable[int]) -> int | list[int]:
    """One number where all layers agree, else the list."""
    found = list(values)
    return found[0] if len(set(found)) == 1 else found


def plain(value: Any) -> Any:
    """A metadata value for JSON: long arrays by their length and first items."""
    if isinstance(value, (str, int, float, bool)):
        return value
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(items) <= SHOWN_ITEMS:
        return items
    return {"length": len(items), "first": items[:SHOWN_ITEMS]}


def show(summary: dict[str, Any]) -> None:
    from rich.table import Table

    console = plain_console()
    for line in headline(summary):
        console.print(line)
    table = Table("type", box=None, pad_edge=False)
    for heading in ("tensors", "weights", "bytes", "bits/weight"):
        table.add_column(heading, justify="right")
    for name, row in {**summary["types"], "all": summary["weights"]}.items():
        counts = (f"{row[key]:,}" for key in ("tensors", "weights", "bytes"))
        table.add_row(name, *counts, f"{row['bits_per_weight']:.3f}")
    console.print()
    console.print(table)
    console.print()
    for key, value in summary["metadata"].items():
        console.print(f"{key} = {shorten(value)}".translate(CONTROLS))


def headline(summary: dict[str, Any]) -> list[str]:
    model = summary["model"]
    lines = [f"{summary['path']}: GGUF v{summary['gguf_version']}, {summary['file_bytes']:,} bytes"]
    if not model["supported"]:
        return [*lines, f"not supported: {model['reason']}".translate(CONTROLS)]
    window = ""
    if model["window_layers"]:
        window = f", window {model['window']} on {model['window_layers']} of them"
    lines.append(f"{model['name']} ({model['architecture']})".translate(CONTROLS))
    lines.append(f"{model['layers']} layers{window}, dim {model['dim']}, ffn {model['ffn_dim']}")
    if experts := model["experts"]:
        active = f"{experts['weights_active']:,} of {summary['weights']['weights']:,} weights"
        lines.append(
            f"{experts['used']} of {experts['count']} experts on {experts['layers']} layers: "
            f"a token meets {active}"
        )
    lines.append(f"vocabulary {model['vocab_size']:,}, context {model['context_train']:,}")
    heads = f"{model['heads']} heads, {model['kv_heads']} kv heads of {model['head_dim']}"
    n_recurrent, state = model["recurrent_layers"], ""
    where = ""
    if n_recurrent:
        where = f" in {model['attention_layers']} layers, {model['recurrence']} in {n_recurrent}"
        state = f", {model['state_bytes']:,} bytes of state per sequence"
    lines.append(f"{model['attention']} attention{where}: {heads}")
    lines.append(f"{model['kv_bytes_per_token']:,} KV bytes per token (float16){state}")
    lines.append(f"chat template: {'yes' if model['chat_template'] else 'no'}")
    return lines


def shorten(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']:,} items: {shorten(value['first'])[1:-1]} …]"
    text = " ".join(repr(value).split()) if not isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["inspect", *sys.argv[1:]])
