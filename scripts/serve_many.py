"""The models that `martlet serve` offers when there are several: where they are, what they take.
Owns names, files and loading; when each is loaded is martlet.server.shelf's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from martlet.quant.errors import MartletError
from martlet.scripts.catalogue import CATALOGUE
from martlet.scripts.console import byte_progress, note
from martlet.scripts.generate import open_model
from martlet.scripts.models import find_model

if TYPE_CHECKING:
    from martlet.runtime.model import Model
    from martlet.server.lifecycle import Lifecycle
    from martlet.server.shelf import Loaded, Place

BLOCK_TOKENS = 32  # as load_model has it
LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")


def served_name(spec: str) -> str:
    return spec if spec in CATALOGUE else Path(spec.rsplit(":", 1)[-1]).stem


def models_of(specs: Sequence[str], folder: Path | None) -> dict[str, str]:
    """Names and where each model is: those named, then the folder's files by name."""
    files = sorted(folder.glob("*.gguf")) if folder else []
    found = [*specs, *(str(file) for file in files if not LATER_SHARD.search(file.stem))]
    models: dict[str, str] = {}
    for spec in found:
        name = served_name(spec)
        if models.setdefault(name, spec) != spec:
            raise MartletError(f"{models[name]} and {spec} would both be called {name}; rename one")
    if not models:
        where = f"no .gguf file in {folder}" if folder else "no --models-dir"
        known = ", ".join(CATALOGUE)
        raise MartletError(f"no model given, and {where}; name one: a path or one of {known}")
    return models


def places(
    models: dict[str, str],
    arguments: dict[str, Any],
    hold: Callable[[Model, str, Lifecycle], Loaded],
    *,
    measures: bool,
) -> list[Place]:
    """arguments: for open_model. measures: find out what each takes in memory."""
    from martlet.server.facts import ModelFacts
    from martlet.server.shelf import Place

    made = []
    for name, spec in models.items():
        with byte_progress() as progress:
            path = find_model(spec, progress=progress)
        need_bytes = memory_of(path, arguments) if measures else 0
        status = path.stat()
        facts = ModelFacts(n_bytes=status.st_size, modified=status.st_mtime)
        load = partial(load_place, path, name, arguments, hold)
        made.append(Place(name, need_bytes, facts, load))
    return made


def load_place(
    path: Path,
    name: str,
    arguments: dict[str, Any],
    hold: Callable[[Model, str, Lifecycle], Loaded],
    lifecycle: Lifecycle,
) -> Loaded:
    with ExitStack() as stack:
        model = stack.enter_context(open_model(str(path), **arguments))
        held = hold(model, name, lifecycle)
        stack.callback(held.close)
        note(f"{name} loaded, {model.context} tokens of context")
        return replace(held, close=partial(unload, name, stack.pop_all()))


def unload(name: str, stack: ExitStack) -> None:
    stack.close()
    note(f"{name} unloaded")


def memory_of(path: Path, arguments: dict[str, Any], max_rows: int = 256) -> int:
    """Bytes that loading takes: weights, keys and values, states, what takes guesses back, the
    model's own block that guesses, scratch. Without a packed copy weights are as in the file."""
    from martlet.quant.gguf_file import GGUFFile
    from martlet.runtime.machine import choose_threads
    from martlet.runtime.model import size_pool
    from martlet.runtime.ops import KvType
    from martlet.runtime.speculation import most_guesses
    from martlet.scripts.estimate import described

    kv_type = KvType[arguments["kv_type"].upper()]
    guesses = most_guesses(arguments["speculate"])
    with GGUFFile.open(path) as file:
        config, plan, nextn = described(file, max_rows)
        sizes = {"context": arguments["context"], "kv_bytes": arguments["kv_bytes"]}
        pool = size_pool(plan, config, BLOCK_TOKENS, kv_type=kv_type, guesses=guesses, **sizes)
        own = nextn if guesses else None
        n_threads = choose_threads(arguments["threads"]).count
        need = pool.need(
            plan,
            own,
            BLOCK_TOKENS,
            kv_type,
            guesses,
            n_threads=n_threads,
            mmap_experts=arguments["mmap_experts"],
        )
        return need.raw_bytes + file.n_bytes if arguments["repack"] is False else need.packed_bytes
