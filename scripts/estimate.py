"""`martlet estimate`: what serving MODEL takes in memory, without loading its weights.
Owns reading the file's description and how the sizes are shown; the formulas are runtime's."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import byte_progress, print_json
from martlet.scripts.models import find_model

if TYPE_CHECKING:
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.estimate import MemoryEstimate
    from martlet.runtime.plan import Plan

LINES = (
    ("weights in the file", "weights_mapped", "mapped while loading, then given back"),
    ("weights packed", "weights_packed", "for the native executor"),
    ("without packing", "weights_raw", "with --no-repack; the mapped file is read instead"),
    ("of them experts", "weights_late", "with --mmap-experts only those that tokens chose"),
    ("keys and values, least", "kv_lower", "what attention can still see: {attention}"),
    ("keys and values, pool", "kv_pool", "allocated: {sequences} x {context} tokens"),
    ("states", "states", "of recurrent layers, whatever the length"),
    ("guesses", "guesses", "beside states, to take guessed tokens back: none with --speculate off"),
    ("own block", "nextn", "that guesses further tokens: none with --speculate off or --draft"),
    ("activations and scratch", "arena", ""),
    ("process and vocabulary", "process", "measured now: interpreter, libraries, tokenizer"),
    ("together", "total", "resident at most"),
    ("free for more", "available", ""),
)


def estimate(
    model: options.ModelArgument,
    context: options.ContextOption = None,
    sequences: Annotated[int, typer.Option(min=1, help="Full contexts held at a time.")] = 8,
    kv_type: options.KvTypeOption = options.KvTypeName.f16,
    threads: options.ThreadsOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the memory MODEL needs, and the longest context that fits."""
    with byte_progress() as progress:
        path = find_model(model, progress=progress)
    found = estimate_file(
        str(path), context=context, sequences=sequences, kv_type=kv_type.value, threads=threads
    )
    if as_json:
        verdict = {"fits": found.fits, "fits_from_file": found.fits_from_file}
        print_json({**asdict(found), "total": found.total, **verdict})
    else:
        show(found)


def estimate_file(
    path: str,
    *,
    context: int | None = None,
    sequences: int = 8,
    kv_type: str = "f16",
    threads: int | None = None,
    max_rows: int = 256,
    block_tokens: int = 32,
) -> MemoryEstimate:
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime import estimate as formulas
    from martlet.runtime.engine import Engine  # noqa: F401  # counts as part of the process
    from martlet.runtime.executors.native_library import Library, NativeUnavailable
    from martlet.runtime.machine import choose_threads, memory, resident_bytes
    from martlet.runtime.ops import KvType
    from martlet.runtime.tokenizer import Tokenizer

    with GGUFFile.open(path) as file:
        config, plan, nextn = described(file, max_rows)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        with contextlib.suppress(NativeUnavailable):  # the sizes hold for where it is built
            Library()
        file.drop_pages()
        process = resident_bytes()
        del tokenizer
        return formulas.estimate(
            plan,
            context=context or min(config.context_train, 8192),
            context_train=config.context_train,
            sequences=sequences,
            block_tokens=block_tokens,
            kv_type=KvType[kv_type.upper()],
            n_threads=choose_threads(threads).count,
            weights_mapped=file.n_bytes,
            process=process,
            available=memory().available_bytes,
            nextn=nextn,
        )


def described(file: GGUFFile, max_rows: int) -> tuple[ModelConfig, Plan, Plan | None]:
    """The plan of a file's model, and that of its own block that guesses further tokens."""
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.models import record_nextn, record_plan
    from martlet.runtime.weights import StoredWeights

    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    config, weights = ModelConfig.from_metadata(file.metadata, shapes), StoredWeights(file.tensors)
    nextn = record_nextn(config, weights, max_rows) if config.nextn else None
    return config, record_plan(config, weights, max_rows), nextn


def show(found: MemoryEstimate) -> None:
    values = {**asdict(found), "total": found.total}
    for name, key, remark in LINES:
        megabytes = values[key] / 1e6
        print(f"{name:<24}{megabytes:>12,.1f} MB  {remark.format(**values)}".rstrip())
    verdict = "fits" if found.fits else "does not fit"
    if found.fits_from_file and not found.fits:
        verdict = "fits with weights read from the file, which is slower (--no-repack)"
    print(
        f"{found.sequences} x {found.context} tokens: {verdict}; "
        f"the longest context that fits {found.sequences} times is {found.largest_context}"
    )
