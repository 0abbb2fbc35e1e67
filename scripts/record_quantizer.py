"""Records what llama-quantize does: the type it gives every tensor, and the errors of its rounding.

Owns: the tiny files it is run on. What is recorded is test data, so that the tests need no
llama.cpp. Rows of real weights come from a checkpoint in safetensors form.

    python scripts/record_quantizer.py tests/data/quantizer --tool llama-quantize \\
        --weights ../shared/data/prose-7m-hf/model.safetensors
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from martlet.quant.formats import FORMATS, dequantize
from martlet.quant.gguf_field import Field
from martlet.quant.gguf_file import GGUFFile
from martlet.quant.gguf_write import OutTensor, write_gguf
from martlet.quant.grid import GRIDS
from martlet.quant.mixtures import PRESETS
from safetensors.numpy import load_file

# layers, columns, ffn columns, query heads, key heads, experts, tied
CASES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "smollm2-135m": ("llama", 30, 576, 1536, 9, 3, 0, True),
    "gemma3-270m": ("gemma3", 18, 640, 2048, 4, 1, 0, True),
    "prose-7m": ("llama", 8, 256, 768, 4, 2, 0, True),
    "llama-8b": ("llama", 32, 4096, 14336, 32, 8, 0, False),
    "llama-70b": ("llama", 80, 8192, 28672, 64, 8, 0, False),
    "odd-rows": ("llama", 9, 96, 172, 2, 1, 0, False),
    "eight-experts": ("llama", 32, 4096, 14336, 32, 8, 8, False),
    "many-experts": ("qwen3moe", 48, 2048, 768, 32, 4, 128, False),
}
ROWS = (  # tensor of the checkpoint, first row
    ("model.embed_tokens.weight", 300),
    ("model.layers.0.self_attn.v_proj.weight", 17),
    ("model.layers.2.self_attn.o_proj.weight", 5),
    ("model.layers.4.mlp.up_proj.weight", 100),
    ("model.layers.5.mlp.down_proj.weight", 40),
    ("model.layers.7.mlp.down_proj.weight", 200),
)
N_ROWS = 8
_DRY_LINE = re.compile(r"\] (\S+)\s+- \[.*?\], type =\s+\w+, size =.*?(?:\((\w+)\))?$")


def case_metadata(case: str) -> dict[str, Any]:
    arch, layers, cols, ffn_cols, heads, kv_heads, experts, _ = CASES[case]
    values = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": cols,
        "feed_forward_length": ffn_cols,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "vocab_size": 4,
    }
    if experts:
        values |= {"expert_count": experts, "expert_used_count": 2}
        values |= {"expert_feed_forward_length": ffn_cols}
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in values.items()}}


def case_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Row lengths as in the model; of rows, which have no say, only two."""
    _, layers, cols, ffn_cols, _, _, experts, is_tied = CASES[case]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (2, cols)}
    stack = (2,) if experts else ()
    suffix = "_exps" if experts else ""
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (cols,),
        "attn_q": (2, cols),
        "attn_k": (2, cols),
        "attn_v": (2, cols),
        "attn_output": (2, cols),
        "ffn_norm": (cols,),
        f"ffn_gate{suffix}": (*stack, 2, cols),
        f"ffn_up{suffix}": (*stack, 2, cols),
        f"ffn_down{suffix}": (*stack, 2, ffn_cols),
    }
    if experts:
        layer["ffn_gate_inp"] = (2, cols)
    for i in range(layers):
        shapes |= {f"blk.{i}.{stem}.weight": shape for stem, shape in layer.items()}
    shapes["output_norm.weight"] = (cols,)
    if not is_tied:
        shapes["output.weight"] = (2, cols)
    return shapes


def write_floats(path: Path, metadata: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
    fields = {key: Field.of(value) for key, value in metadata.items()}
    f32 = FORMATS["F32"]
    write_gguf(
        path,
        fields,
        [OutTensor(k, v.shape, f32, partial(np.asarray, v)) for k, v in values.items()],
    )


def write_imatrix(path: Path, importance: Mapping[str, np.ndarray]) -> None:
    sums = {f"{k}.in_sum2": v[None] * np.float32(512) for k, v in importance.items()}
    counts = {f"{k}.counts": np.full((1, 1), 512, np.float32) for k in importance}
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": ["none"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 512,
    }
    write_floats(path, metadata, sums | counts)


def run(tool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tool} {arguments}: {done.stdout[-800:]}{done.stderr[-800:]}")
    return done.stdout + done.stderr


def record_types(tool: Path, folder: Path) -> dict[str, Any]:
    """{case: {preset, with "+imatrix" where one was given: {name: format}}}"""
    types: dict[str, Any] = {}
    for case in CASES:
        path, imatrix = folder / "case.gguf", folder / "imatrix.gguf"
        shapes = case_shapes(case)
        write_floats(path, case_metadata(case), {k: np.ones(s, "f4") for k, s in shapes.items()})
        write_imatrix(
            imatrix, {"blk.0.ffn_up.weight": np.ones(shapes["token_embd.weight"][1], "f4")}
        )
        types[case] = {}
        for preset in PRESETS:
            for suffix, options in (("", ()), ("+imatrix", ("--imatrix", imatrix))):
                shown = run(tool, "--dry-run", *options, path, preset)
                types[case][preset + suffix] = dict(dry_run_types(shown))
    return types


def dry_run_types(shown: str) -> Iterator[tuple[str, str]]:
    upper = {name.lower(): name for name in FORMATS}
    for line in shown.splitlines():
        if (match := _DRY_LINE.search(line)) and match[2]:
            yield match[1], upper[match[2].lower()]


def by_letter(types: dict[str, Any]) -> dict[str, Any]:
    """One letter for a format, one string for a column of tensors: a small file."""
    letters = {name: chr(ord("a") + i) for i, name in enumerate(FORMATS)}
    packed: dict[str, Any] = {"letters": {v: k for k, v in letters.items()}, "cases": {}}
    for case, presets in types.items():
        names = sorted({name for chosen in presets.values() for name in chosen})
        packed["cases"][case] = {
            "names": names,
            "presets": {
                preset: "".join(letters[chosen[n]] if n in chosen else "." for n in names)
                for preset, chosen in presets.items()
            },
        }
    return packed


def record_errors(tool: Path, folder: Path, weights: Path) -> dict[str, np.ndarray]:
    """Rows, an importance for each, and Σ importance·error² of llama-quantize, (formats, rows)."""
    source = load_file(weights)
    rng = np.random.default_rng(0)
    rows = {f"blk.{i}.ffn_up.weight": source[k][at : at + N_ROWS] for i, (k, at) in enumerate(ROWS)}
    importance = {
        name: np.exp(rng.standard_normal(x.shape[1])).astype(np.float32) for name, x in rows.items()
    }
    case, imatrix, out = folder / "rows.gguf", folder / "imatrix.gguf", folder / "out.gguf"
    write_floats(
        case,
        case_metadata("prose-7m") | {"llama.block_count": len(rows)},
        rows | {"token_embd.weight": np.zeros((2, 256), np.float32)},
    )
    write_imatrix(imatrix, importance)
    recorded = {f"rows{i}": x for i, x in enumerate(rows.values())}
    recorded |= {f"importance{i}": h for i, h in enumerate(importance.values())}
    for is_weighted, options in enumerate(((), ("--imatrix", imatrix))):
        errors = np.zeros((len(GRIDS), len(rows)))
        for k, name in enumerate(GRIDS):
            run(tool, "--pure", *options, case, out, {"Q3_K": "Q3_K_M"}.get(name, name))
            with GGUFFile.open(out) as file:
                for j, (tensor, x) in enumerate(rows.items()):
                    stored = file.tensors[tensor]
                    assert stored.format.name == name
                    rest = x - dequantize(stored.data, stored.format, stored.shape).astype(float)
                    weight = importance[tensor] if is_weighted else 1
                    errors[k, j] = (weight * rest**2).sum()
        recorded["weighted_errors" if is_weighted else "errors"] = errors
    recorded["formats"] = np.array(list(GRIDS))
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tool", type=Path, required=True, help="llama-quantize")
    parser.add_argument("--weights", type=Path, required=True, help="model.safetensors, F32")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        types = by_letter(record_types(args.tool, Path(name)))
        (args.folder / "types.json").write_text(json.dumps(types, indent=0) + "\n")
        errors = record_errors(args.tool, Path(name), args.weights)
        np.savez_compressed(args.folder / "errors.npz", **errors)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
