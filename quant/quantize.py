"""A model file in other formats: reads a GGUF file tensor by tensor, encodes, writes another.

Owns: what is copied and what is encoded, and the account of what was lost. Must not know: how the
formats were chosen (`mixtures.py` and others make the `Plan`), how blocks are fitted, how a file
is laid out. Memory holds two encoded tensors and a few pieces of their rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from os import PathLike
from typing import Any

import numpy as np

from .encode import BadWeights, check_weights, compiled_ahead, encode, pieces_of, threads_of
from .errors import FileFormatError
from .formats import FORMATS, Format, dequantize
from .gguf_field import Field
from .gguf_file import GGUFFile, GGUFTensor
from .gguf_part import read_stored_fields
from .gguf_write import OutTensor, file_bytes, write_gguf
from .mixtures import Choice

QUANTIZATION_VERSION = 2  # of the block formats, as ggml counts
_SPLIT_PREFIX = "split."

# Weights float32 (rows, cols) to the bytes of all of them, uint8 (rows, row_bytes).
Encoder = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Plan:
    """What becomes of a model's tensors.

    Tensors without an entry in `formats` are copied, as are those that have the format already.
    Importance is float32 (cols,), or (matrices, cols) for a stack of matrices. A tensor with an
    entry in `encoders` is encoded by that in one call, which must yield its format. `wanted` is
    told in the report: the formats that were to be, of tensors whose rows do not fill them.
    """

    formats: Mapping[str, str]
    file_type: int  # general.file_type
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    fields: Mapping[str, Field] = field(default_factory=dict)  # further metadata
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, chosen: Mapping[str, Choice], file_type: int, **more: Any) -> Plan:
        formats = {name: choice.format for name, choice in chosen.items()}
        wanted = {name: c.wanted for name, c in chosen.items() if c.wanted != c.format}
        return cls(formats, file_type, wanted=wanted, **more)


@dataclass(frozen=True)
class TensorReport:
    name: str
    shape: tuple[int, ...]
    source: str  # format
    format: str
    n_bytes: int
    relative_rmse: float  # √(Σ error² / Σ weight²); 0 for a copy
    wanted: str | None = None  # the format whose blocks these rows do not fill, if there is one

    @classmethod
    def of(cls, tensor: GGUFTensor, plan: Plan, relative_rmse: float) -> TensorReport:
        fmt = target_format(tensor, plan)
        n_bytes = fmt.data_bytes(tensor.shape)
        return cls(
            tensor.name, tensor.shape, tensor.format.name, fmt.name, n_bytes, relative_rmse,
            plan.wanted.get(tensor.name),
        )  # fmt: skip

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def is_requantized(self) -> bool:
        """Its source was rounded to blocks before, so the losses of both add up."""
        return self.source != self.format and FORMATS[self.source].block > 1


def target_format(tensor: GGUFTensor, plan: Plan) -> Format:
    return FORMATS[plan.formats.get(tensor.name, tensor.format.name)]


def quantize_file(
    source: GGUFFile,
    out: str | PathLike[str],
    plan: Plan,
    *,
    threads: int | None = None,
    on_tensor: Callable[[TensorReport], None] | None = None,
) -> list[TensorReport]:
    """Writes `out` whole or not at all; its bytes depend on neither threads nor time.

    Raises FileFormatError where the plan does not fit the file, BadWeights naming tensor and
    place for weights that are not finite, NoSpace.
    """
    check_plan(source, plan)
    reports: dict[str, TensorReport] = {}
    encoded = [t for t in source.tensors.values() if target_format(t, plan) is not t.format]
    names = [target_format(tensor, plan).name for tensor in encoded]
    with threads_of(threads) as pool, compiled_ahead(names, pool) as wait_for:
        # The next tensor is begun before this one is waited for: all threads have work.
        begun = (_begun(tensor, plan, pool, wait_for) for tensor in source.tensors.values())
        waiting = deque(islice(begun, 1))

        def data_of(tensor: GGUFTensor) -> np.ndarray:
            waiting.extend(islice(begun, 1))
            data, rmse = waiting.popleft()()
            reports[tensor.name] = TensorReport.of(tensor, plan, rmse)
            return data

        def written(tensor: OutTensor) -> None:
            source.drop_pages()
            if on_tensor is not None:
                on_tensor(reports[tensor.name])

        write_gguf(out, _fields(source, plan), _tensors(source, plan, data_of), on_tensor=written)
    return list(reports.values())


def quantized_bytes(source: GGUFFile, plan: Plan) -> int:
    """The size of the file that `quantize_file` would write."""

    def never(tensor: GGUFTensor) -> np.ndarray:
        raise AssertionError(f"{tensor.name} is not asked for")

    return file_bytes(_fields(source, plan), _tensors(source, plan, never))


def _fields(source: GGUFFile, plan: Plan) -> dict[str, Field]:
    fields = read_stored_fields(source.metadata_path)
    fields = {key: value for key, value in fields.items() if not key.startswith(_SPLIT_PREFIX)}
    return fields | {
        "general.file_type": Field.uint32(plan.file_type),
        "general.quantization_version": Field.uint32(QUANTIZATION_VERSION),
        **plan.fields,
    }


def _tensors(
    source: GGUFFile, plan: Plan, data_of: Callable[[GGUFTensor], np.ndarray]
) -> list[OutTensor]:
    return [
        OutTensor(tensor.name, tensor.shape, target_format(tensor, plan), partial(data_of, tensor))
        for tensor in source.tensors.values()
    ]


def check_plan(source: GGUFFile, plan: Plan) -> None:
    """Everything that can be refused before a weight is read."""
    if not source.tensors:
        raise FileFormatError(f"{source.path}: holds no tensors, so there is nothing to quantize")
    for name in (*plan.formats, *plan.encoders):
        if name not in source.tensors:
            raise FileFormatError(f"{source.path}: has no tensor {name!r}, which the plan names")
    for tensor in source.tensors.values():
        try:
            target_format(tensor, plan).data_bytes(tensor.shape)
        except FileFormatError as error:
            raise FileFormatError(f"tensor {tensor.name!r}: {error}") from None
        importance = plan.importance.get(tensor.name)
        if importance is not None and importance.shape not in _importance_shapes(tensor.shape):
            raise FileFormatError(
                f"importance of {tensor.name!r} has shape {importance.shape}, the tensor"
                f" {tensor.shape}; was it made for another model?"
            )


def _importance_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    cols, stack = shape[-1], math.prod(shape[:-2])
    return [(cols,), (1, cols), (stack, cols)]


def _begun(
    tensor: GGUFTensor, plan: Plan, pool: ThreadPoolExecutor, wait_for: Callable[[str], None]
) -> Callable[[], tuple[np.ndarray, float]]:
    """Hands the pieces of a tensor to the threads; what is returned waits for all of them, and
    gives the bytes in the new format, uint8 (n_bytes,), and the relative RMSE."""
    fmt = target_format(tensor, plan)
    cols = tensor.shape[-1]
    rows = tensor.n_weights // cols
    data = tensor.data.reshape(rows, -1)
    is_copy = fmt is tensor.format and tensor.name not in plan.encoders
    if is_copy:
        out = data
    elif tensor.name in plan.encoders:
        values = dequantize(tensor.data, tensor.format, (rows, cols))
        out = plan.encoders[tensor.name](values).reshape(rows, fmt.data_bytes((cols,)))
    else:
        out = np.empty((rows, fmt.data_bytes((cols,))), np.uint8)

    def one_piece(start: int, stop: int, importance: np.ndarray | None) -> np.ndarray:
        """Σ error² and Σ weight² of these rows."""
        x = dequantize(data[start:stop].reshape(-1), tensor.format, (stop - start, cols))
        try:
            if is_copy:
                check_weights(x, fmt.name, start)
                return np.zeros(2)
            if tensor.name not in plan.encoders:
                wait_for(fmt.name)
                out[start:stop] = encode(x, fmt.name, importance, threads=1, first_row=start)
        except BadWeights as error:
            raise BadWeights(f"tensor {tensor.name!r}: {error}") from None
        y = dequantize(out[start:stop].reshape(-1), fmt, x.shape)
        # Squares of weights that float32 holds may be beyond it, on either side.
        rest, x = (x - y).astype(np.float64), x.astype(np.float64)
        return np.array([np.vdot(rest, rest), np.vdot(x, x)])

    importance = plan.importance.get(tensor.name)
    stack = [None] if importance is None else importance.reshape(-1, cols)
    stack_rows = rows // len(stack)
    pieces = [
        pool.submit(one_piece, k * stack_rows + start, k * stack_rows + stop, weights)
        for k, weights in enumerate(stack)
        for start, stop in pieces_of(stack_rows, cols)
    ]

    def finished() -> tuple[np.ndarray, float]:
        squares = sum((piece.result() for piece in pieces), start=np.zeros(2))
        return out.reshape(-1), math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0

    return finished
