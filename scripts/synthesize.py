"""`martlet synthesize`: a model file of a real shape with random weights, for measuring speed.
Owns the writing of the file, tensor by tensor; shapes and formats are in shapes.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.scripts.console import byte_progress, note
from martlet.scripts.errors import NoSpace

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from martlet.scripts.shapes import Mixture, Shape

PIECE_WEIGHTS = 1 << 24  # held in memory at a time
MARGIN_BYTES = 64 << 20
Progress = Callable[[str, int, int], None]  # (what is happening, bytes done, bytes in all)


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    size: tuple[int, ...]
    format: str
    n_bytes: int


def synthesize(
    shape: Annotated[str, typer.Argument(help="For instance llama-1b; a wrong name lists all.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf")],
    type_: Annotated[
        str, typer.Option("--type", help="Q4_K_M, Q5_K_M or any format such as Q4_0, F16.")
    ] = "Q4_K_M",
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=260, help="Another vocabulary.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write OUT.gguf: random weights in the SHAPE of a known model. It talks nonsense."""
    from martlet.scripts.shapes import find_mixture, find_shape

    found = find_shape(shape)
    found = dataclasses.replace(
        found,
        n_layers=layers or found.n_layers,
        vocab_size=vocab_size or found.vocab_size,
    )
    with byte_progress() as progress:
        n_bytes = write_model(out, found, find_mixture(type_), seed=seed, progress=progress)
    note(f"{out}: {n_bytes / 1e6:,.0f} MB")


def write_model(
    path: Path,
    shape: Shape,
    mixture: Mixture,
    *,
    seed: int = 0,
    progress: Progress = lambda what, done_bytes, total_bytes: None,
) -> int:
    """The file appears under its name only when it is whole. Returns its bytes."""
    from martlet.quant.formats import FORMATS

    tensors = []
    for name, size in shape.tensors():
        format_name = mixture.format_of(name, size, shape)
        n_bytes = FORMATS[format_name].data_bytes(size)
        tensors.append(Tensor(name, size, format_name, n_bytes))
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space(path.parent, sum(t.n_bytes for t in tensors))
    with whole_or_nothing(path) as part:
        alignment = write_head(part, shape, mixture, tensors)
        write_tensors(part, tensors, alignment, seed, progress)
        return part.stat().st_size


def check_space(folder: Path, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes + MARGIN_BYTES:
        raise NoSpace(
            f"{folder} has {free_bytes >> 20} MiB free, the model needs"
            f" {(need_bytes + MARGIN_BYTES) >> 20} MiB; free some, or write it to another disk"
        )


@contextlib.contextmanager
def whole_or_nothing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its name at the end, or goes away."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(0o666 & ~current_umask())  # mkstemp's file is for its owner alone
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_head(part: Path, shape: Shape, mixture: Mixture, tensors: list[Tensor]) -> int:
    """Metadata and the list of tensors; returns the alignment of what follows."""
    import gguf
    import numpy as np
    from martlet.scripts.random_vocabulary import vocabulary

    writer = gguf.GGUFWriter(part, shape.arch)
    writer.add_name(f"{shape.name} with random weights")
    writer.add_quantization_version(2)
    writer.add_file_type(mixture.file_type)
    for key, value in {**shape.metadata(), **vocabulary(shape.vocab_size)}.items():
        add_value(writer, key, value)
    for t in tensors:
        kind = gguf.GGMLQuantizationType[t.format]
        writer.add_tensor_info(t.name, t.size, np.dtype(np.float32), t.n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return int(writer.data_alignment)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def write_tensors(
    part: Path, tensors: list[Tensor], alignment: int, seed: int, progress: Progress
) -> None:
    import numpy as np

    rng = np.random.Generator(np.random.SFC64(seed))
    total_bytes = sum(t.n_bytes for t in tensors)
    done_bytes = 0
    with open(part, "ab") as out:
        for tensor in tensors:
            out.write(bytes(-out.tell() % alignment))
            for piece in tensor_pieces(tensor, rng):
                out.write(piece.data)
                done_bytes += piece.nbytes
                progress(f"writing {tensor.format}", done_bytes, total_bytes)
        out.write(bytes(-out.tell() % alignment))


def tensor_pieces(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Norms are 1; the rows of matrices have length 1, so that activations keep theirs."""
    import numpy as np
    from martlet.quant.random_blocks import random_weights

    if len(tensor.size) == 1:
        yield np.ones(tensor.size, np.float32).view(np.uint8)
        return
    left = tensor.size[0] * tensor.size[1]
    while left:
        n_weights = min(left, PIECE_WEIGHTS)
        yield random_weights(tensor.format, n_weights, rng, tensor.size[1] ** -0.5)
        left -= n_weights


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["synthesize", *sys.argv[1:]])
