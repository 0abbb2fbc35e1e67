"""`martlet synthesize`: a model file of a real shape with random weights, for measuring speed.
Owns the random tensors; shapes and formats are in shapes.py, the writing in quant.gguf_write."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.scripts.console import byte_progress, note

if TYPE_CHECKING:
    import numpy as np
    from martlet.quant.formats import Format
    from martlet.quant.mixtures import Preset
    from martlet.scripts.shapes import Shape

PIECE_WEIGHTS = 1 << 24  # of one tensor, drawn at a time
Progress = Callable[[str, int, int], None]  # (what is happening, bytes done, bytes in all)


def synthesize(
    shape: Annotated[str, typer.Argument(help="For instance llama-1b; a wrong name lists all.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf")],
    type_: Annotated[
        str, typer.Option("--type", help="A preset of llama.cpp, such as Q4_K_M, Q4_0, F16.")
    ] = "Q4_K_M",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=260, help="Another vocabulary.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write OUT.gguf: random weights in the SHAPE of a known model. It talks nonsense."""
    from martlet.quant.mixtures import find_preset
    from martlet.scripts.shapes import find_shape

    found = find_shape(shape)
    found = dataclasses.replace(
        found,
        n_layers=layers or found.n_layers,
        vocab_size=vocab_size or found.vocab_size,
    )
    with byte_progress() as progress:
        n_bytes = write_model(out, found, find_preset(type_), seed=seed, progress=progress)
    note(f"{out}: {n_bytes / 1e6:,.0f} MB")


def write_model(
    path: Path,
    shape: Shape,
    preset: Preset,
    *,
    seed: int = 0,
    progress: Progress = lambda what, done_bytes, total_bytes: None,
) -> int:
    """The file appears under its name only when it is whole. Returns its bytes."""
    import numpy as np
    from martlet.quant.formats import FORMATS
    from martlet.quant.gguf_field import Field
    from martlet.quant.gguf_write import OutTensor, write_gguf
    from martlet.quant.mixtures import mixture

    rng = np.random.Generator(np.random.SFC64(seed))
    sizes = dict(shape.tensors())
    values = metadata(shape, preset)
    formats = mixture(preset, values, sizes)
    fields = {key: Field.of(value) for key, value in values.items()}
    tensors = []
    for name, size in sizes.items():
        fmt = FORMATS[formats.get(name, "F32")]
        tensors.append(OutTensor(name, size, fmt, partial(random_tensor, fmt, size, rng, name)))
    total_bytes = sum(t.n_bytes for t in tensors)
    done_bytes = 0

    def written(tensor: OutTensor) -> None:
        nonlocal done_bytes
        done_bytes += tensor.n_bytes
        progress(f"writing {tensor.format.name}", done_bytes, total_bytes)

    return write_gguf(path, fields, tensors, on_tensor=written)


def metadata(shape: Shape, preset: Preset) -> dict[str, Any]:
    from martlet.scripts.random_vocabulary import vocabulary

    return {
        "general.architecture": shape.arch,
        "general.name": f"{shape.name} with random weights",
        "general.quantization_version": 2,
        "general.file_type": preset.file_type,
        **shape.metadata(),
        **vocabulary(shape.vocab_size),
    }


def random_tensor(
    fmt: Format, size: tuple[int, ...], rng: np.random.Generator, name: str = ""
) -> np.ndarray:
    """uint8 (n_bytes,). Norms are 1; the rows of matrices have length 1, so that activations keep
    theirs. States fade."""
    import numpy as np
    from martlet.quant.random_blocks import random_weights

    if name.endswith("ssm_a"):
        return np.full(size, -1, np.float32).view(np.uint8).reshape(-1)
    if len(size) == 1:
        return np.ones(size, np.float32).view(np.uint8)
    out = np.empty(fmt.data_bytes(size), np.uint8)
    n_weights = math.prod(size)
    for start in range(0, n_weights, PIECE_WEIGHTS):
        n_piece = min(n_weights - start, PIECE_WEIGHTS)
        at, n_bytes = fmt.data_bytes((start,)), fmt.data_bytes((n_piece,))
        out[at : at + n_bytes] = random_weights(fmt.name, n_piece, rng, size[-1] ** -0.5)
    return out


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["synthesize", *sys.argv[1:]])
