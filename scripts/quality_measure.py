"""What `martlet quality` measures beside divergences: sizes, speeds and the conditions of both.
Owns the alternation of files; must not know how a result is shown."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.machine import choose_threads
from martlet.scripts.bench_cases import Bench, Case, Room
from martlet.scripts.bench_measure import Figure
from martlet.scripts.console import byte_progress
from martlet.scripts.doctor import cpu_name, version
from martlet.scripts.generate import open_model
from martlet.scripts.models import find_model
from martlet.scripts.options import LoadOptions


@dataclass(frozen=True)
class Size:
    file_bytes: int
    n_weights: int
    """Numbers in the file's tensors as stored: a head tied to the embedding counts once."""

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file, vocabulary and metadata included."""
        return 8 * self.file_bytes / self.n_weights


def size_of(spec: str) -> Size:
    with byte_progress() as progress:
        path = find_model(spec, progress=progress)
    with GGUFFile.open(path) as file:
        return Size(file.n_bytes, sum(tensor.n_weights for tensor in file.tensors.values()))


@dataclass(frozen=True)
class SpeedWork:
    """One prompt of `prefill` rows, then `decode` single rows on an empty cache; repeated."""

    prefill: int
    decode: int
    repeat: int

    @property
    def cases(self) -> dict[str, Case]:
        return {
            "prefill": Case("prefill", self.prefill),
            "decode": Case("decode", self.decode),
        }


@dataclass(frozen=True)
class Speed:
    """Tokens per second."""

    prefill: Figure
    decode: Figure


def measure_speeds(
    specs: Sequence[str], work: SpeedWork, load: LoadOptions, on_file: Callable[[str], None]
) -> list[Speed]:
    """Every turn measures each file once, and every other turn goes backwards, so that a drift of
    the machine hits all alike. Each file is opened anew: memory never holds two."""
    samples: dict[str, dict[str, list[float]]] = {
        spec: {name: [] for name in work.cases} for spec in specs
    }
    for turn in range(work.repeat):
        for spec in reversed(specs) if turn % 2 else specs:
            on_file(f"speed {turn + 1}/{work.repeat} {spec}")
            for name, tokens_per_s in run_once(spec, work, load).items():
                samples[spec][name].append(tokens_per_s)
    on_file("")
    return [
        Speed(**{name: Figure(tuple(values)) for name, values in samples[spec].items()})
        for spec in specs
    ]


def run_once(spec: str, work: SpeedWork, load: LoadOptions) -> dict[str, float]:
    """Tokens per second of each case, after a warm-up."""
    cases = work.cases
    room = Room.of(list(cases.values()))
    with open_model(spec, **load.over_contexts(room.positions)) as model:
        bench = Bench(model.executor, room, model.config.vocab_size)
        bench.warm_up(list(cases.values()))
        return {name: case.tokens_in_all / bench.run(case) for name, case in cases.items()}


def conditions(load: LoadOptions, work: SpeedWork) -> dict[str, Any]:
    """What the figures mean nothing without."""
    threads = choose_threads(load.threads)
    return {
        "martlet": version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": threads.count,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "prefill_rows": work.prefill,
        "decode_steps": work.decode,
        "repeat": work.repeat,
    }
