"""What the native tests hand to C, written down for machines without Python: csrc/replay.c runs it
there and compares what comes out with what the scalar kernels gave here, bit by bit.

    python -m tests.runtime.record_cases FOLDER [--short]

A case is one file: a head, then the structs of martlet.h, whose pointers are offsets from the
file's start. It holds for one version of that interface, so nobody keeps such files.
"""

from __future__ import annotations

import argparse
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from martlet.quant.codebooks import packed_codebook
from martlet.quant.formats import FORMATS
from martlet.runtime.executors import native
from martlet.runtime.plan import Plan
from martlet.runtime.step import Step
from martlet.runtime.weights import StoredWeights

from .op_cases import OP_CASES
from .product_cases import product_plan
from .tiny import BLOCK_FORMATS, Chunk, make_step

MAGIC = b"mtcase1\0"
HEAD = "<8s2i4q"  # magic, interface, steps; bytes, places of plan, options and steps
LINE = 64  # bytes to which places are aligned
ROW_COUNTS = (1, 2, 5, 6, 7, 12, 13, 25)
SHORT_ROW_COUNTS = (1, 7)
FORMAT_NAMES = {f.ggml_type: f.name for f in FORMATS.values()}


@dataclass
class Recording:
    """One engine's plan and options, and each of its steps with the logits that came out."""

    ffi: Any
    data: bytearray = field(default_factory=lambda: bytearray(struct.calcsize(HEAD)))
    plan: int = 0
    options: int = 0
    steps: list[bytes] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)

    def put(self, data: bytes) -> int:
        self.data += bytes(-len(self.data) % LINE)
        place = len(self.data)
        self.data += data or b"\0"
        return place

    def moved(self, original: Any, kind: str, lengths: dict[str, int]) -> Any:
        """A copy of a struct whose pointers, of so many elements each, are places in the data."""
        copy = self.ffi.new(f"{kind} *")
        copy[0] = original[0]
        for name, n in lengths.items():
            pointer = getattr(original, name)
            if pointer == self.ffi.NULL:
                continue
            kind_of_it = self.ffi.typeof(pointer)
            size = n if kind_of_it.item.kind == "void" else n * self.ffi.sizeof(kind_of_it.item)
            place = self.put(bytes(self.ffi.buffer(self.ffi.cast("char *", pointer), size)))
            setattr(copy, name, self.ffi.cast(kind_of_it, place))
        return copy

    def bytes_of(self, record: Any) -> bytes:
        return bytes(self.ffi.buffer(record))

    def begin(self, lib: Any, plan: Any, options: Any) -> None:
        tensors = b""
        for t in range(plan.n_tensors):
            tensor = self.ffi.addressof(plan.tensors, t)
            has_codes = tensor.codebook != self.ffi.NULL
            n_codes = packed_codebook(FORMAT_NAMES[tensor.format]).size if has_codes else 0
            lengths = {"data": tensor.n_bytes, "codebook": n_codes}
            moved = self.moved(tensor, "mt_tensor", lengths)
            moved.flags &= lib.MT_TENSOR_STAYS  # no file is mapped there
            tensors += self.bytes_of(moved)
        lengths = {name: getattr(plan, f"n_{name}") for name in ("ops", "buffers", "kv_layers")}
        lengths |= {name: plan.n_states for name in ("states", "inputs")}
        copy = self.moved(plan, "mt_plan", lengths)
        copy.tensors = self.ffi.cast("mt_tensor *", self.put(tensors))
        buffers = [plan.buffers[b] for b in range(plan.n_buffers)]
        self.widths = {
            "logits": next((b.width for b in buffers if b.is_logits), 0),
            "hidden": buffers[plan.hidden].width if plan.hidden >= 0 else 0,
            "adapters": plan.n_adapters,
            "given": plan.given,
        }
        self.plan = self.put(self.bytes_of(copy))
        self.options = self.put(self.bytes_of(options))

    def note(self, step: Any) -> None:
        rows, seqs = step.n_rows, step.n_seqs
        lengths = {
            **dict.fromkeys(("tokens", "positions", "segments"), rows),
            **dict.fromkeys(("states", "guesses", "replays"), seqs),
            "seq_start": seqs + 1,
            **dict.fromkeys(("block_table", "window_table"), seqs * step.table_width),
            "out_rows": step.n_out,
            "hidden_rows": step.n_hidden,
            "logits": step.n_out * self.widths["logits"],
            "hidden": step.n_hidden * self.widths["hidden"],
            "adapters": seqs * self.widths["adapters"],
            "given": rows * self.widths["given"],
        }
        self.steps.append(self.bytes_of(self.moved(step, "mt_step", lengths)))

    def write(self, path: Path, abi_version: int) -> None:
        steps = self.put(b"".join(self.steps))
        places = (len(self.data), self.plan, self.options, steps)
        self.data[: struct.calcsize(HEAD)] = struct.pack(
            HEAD, MAGIC, abi_version, len(self.steps), *places
        )
        path.write_bytes(self.data)


class NotingLibrary(native.Library):
    """The library, whose calls that make engines and run steps are noted."""

    recordings: list[Recording]

    def __init__(self) -> None:
        super().__init__()
        real, ffi = self.lib, self.ffi

        class Noting:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            @staticmethod
            def mt_engine_create(plan: Any, options: Any, bad: Any, err: Any) -> Any:
                recording = Recording(ffi)
                recording.begin(real, plan, options)
                NotingLibrary.recordings.append(recording)
                return real.mt_engine_create(plan, options, bad, err)

            @staticmethod
            def mt_engine_run(engine: Any, step: Any, err: Any) -> int:
                status = int(real.mt_engine_run(engine, step, err))
                NotingLibrary.recordings[-1].note(step)
                return status

        self.lib = Noting()


def recorded(run: Callable[[], object]) -> Recording:
    """The recording of the one engine that `run` makes and uses."""
    NotingLibrary.recordings = []
    with mock.patch.object(native, "Library", NotingLibrary):
        run()
    (recording,) = NotingLibrary.recordings
    return recording


ScalarExecutor = partial(native.NativeExecutor, isa="scalar", n_threads=2)


def run_steps(plan: Plan, weights: StoredWeights, steps: Sequence[Step]) -> None:
    executor = ScalarExecutor(plan, weights, n_blocks=2)
    try:
        for step in steps:
            executor.run(step)
    finally:
        executor.close()


def cases(short: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every format in products of few and many rows, alone and gated, in one plane and in two; then
    every op. What runs, by name. Short: fewer rows, one product of each format, some ops."""
    counts = SHORT_ROW_COUNTS if short else ROW_COUNTS
    steps = [make_step([Chunk(range(n), 0, range(2))]) for n in counts]
    kinds = list(itertools.product((False, True), (False, True)))
    for i, name in enumerate(BLOCK_FORMATS):
        for is_gated, precise in kinds[i % 4 : i % 4 + 1] if short else kinds:
            what = f"{name}-{'gated' if is_gated else 'product'}-{1 + precise}"
            plan, weights = product_plan(name, is_gated, precise)
            yield what, partial(run_steps, plan, weights, steps)
    for case in OP_CASES[:: 16 if short else 1]:
        yield case.name, partial(case.run, ScalarExecutor)


def record(folder: Path, *, short: bool = False) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    version = native.Library().lib.mt_abi_version()
    for name, run in cases(short):
        paths.append(folder / (re.sub(r"[^\w.-]+", "_", name) + ".case"))
        recorded(run).write(paths[-1], version)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what native tests hand to C.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--short", action="store_true", help="fewer rows, a quarter of the products, some ops"
    )
    args = parser.parse_args()
    paths = record(args.folder, short=args.short)
    n_bytes = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} cases, {n_bytes / 1e6:.1f} MB in {args.folder}")


if __name__ == "__main__":
    main()
