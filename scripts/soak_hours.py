"""`martlet soak MODEL --hours N`: a server under everything at once, each answer held against the
one it gave alone.
Owns the two servers, the visitors and the verdict; must not know what is asked (soak_questions.py).

The solo answers come from a server of its own, without guesses, asked one after the other. The
server under load guesses, has too little room for all, and loses a second model time and again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from martlet.quant.errors import MartletError
from martlet.scripts.console import note
from martlet.scripts.once import JSON_TYPE, serving_process
from martlet.scripts.soak_questions import KINDS, PLAIN, Question, Streamed, questions, what_counts

LEAVES = 0.2
"""Of the visits, within the answer."""
WARM_UP = 4  # the first quarter of the time
CYCLES = 40  # at most, of the second model's coming and going
LEAST_CYCLE_S = 16.0
SILENT_S = 300.0
SETTLE_S = 10.0
LOOKS_PER_CYCLE = 16
GROWN = 0.02
"""Of resident memory after the warm-up."""
N_EACH = 4
"""Questions of each kind."""


class Load(NamedTuple):
    """How the servers are started."""

    models: Sequence[str]
    """The first is asked all the time, others in turns."""
    options: Sequence[str]
    speculate: str = "auto"


class Look(NamedTuple):
    at_s: float
    resident_bytes: int
    n_files: int | None
    n_threads: int | None


@dataclass
class LongSoak:
    load: Load
    seconds: float
    n_clients: int
    seed: int
    n_each: int = N_EACH
    answered: Counter[str] = field(default_factory=Counter)
    """Whole answers that were right, by kind."""
    requested: Counter[str] = field(default_factory=Counter)
    """Requests of the engine behind them, by model."""
    left: Counter[str] = field(default_factory=Counter)
    """Requests whose client did not wait for the end, by model."""
    faults: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the models, as the server calls them."""
    totals: dict[str, float] = field(default_factory=dict)
    """Of the first model at the end, by the server's own metrics."""

    def run(self) -> None:
        self._ask(self._solo())
        self._judge_looks()

    def _solo(self) -> list[tuple[Question, Any]]:
        """Every question with the answer that it has alone."""
        options = ["--speculate", "off", *self.load.options]
        with serving_process(self.load.models, options) as (url, _):
            address = urlsplit(url).netloc
            kinds = tuple(KINDS)
            asked: list[Question] = []
            self.names = [each["id"] for each in _get(address, "/v1/models")["data"]]
            for model in self.names:
                visit(address, Question("", "/tokenize", {"model": model, "content": "a"}))  # loads
                stats = _get(address, f"/stats?model={model}")
                chosen, draw = kinds if stats["has_chat_template"] else PLAIN, Random(self.seed)
                asked += questions(draw, model, chosen, self.n_each, stats["context"])
            start = time.monotonic()
            solo = [(question, visit(address, question)) for question in asked]
            note(f"{len(solo)} answers alone, {time.monotonic() - start:.0f} s")
        wrong = [f"{q.kind}: {answer}" for q, answer in solo if isinstance(answer, Refusal)]
        if wrong:
            raise Refused(f"a question is refused when asked alone: {wrong[0]}")
        return solo

    def _ask(self, solo: Sequence[tuple[Question, Any]]) -> None:
        self._cycle_s = max(LEAST_CYCLE_S, self.seconds / CYCLES)
        options = ["--speculate", self.load.speculate, *self.load.options]
        options += ["--keep-alive", f"{self._cycle_s / 4:.3g}"] if len(self.load.models) > 1 else []
        with serving_process(self.load.models, options) as (url, child):
            address = urlsplit(url).netloc
            self._start, self._lock = time.monotonic(), threading.Lock()
            clients = [
                threading.Thread(target=self._visit_often, args=(address, nth, solo), daemon=True)
                for nth in range(self.n_clients)
            ]
            for client in clients:
                client.start()
            while any(client.is_alive() for client in clients):
                time.sleep(self._cycle_s / LOOKS_PER_CYCLE)
                self._look(address, child.pid)
            self._settle(address)
            self._look(address, child.pid)
            self._judge_totals(address)
        if child.returncode not in (0, -15):
            self.faults[f"the server ended with code {child.returncode}"] += 1

    def _visit_often(self, address: str, nth: int, solo: Sequence[tuple[Question, Any]]) -> None:
        draw = Random(f"{self.seed}-{nth}")
        first = [each for each in solo if each[0].model == self.names[0]]
        while (spent := time.monotonic() - self._start) < self.seconds:
            # Half of each cycle the other models are asked for as well; then they go.
            others_too = spent % self._cycle_s * 2 < self._cycle_s
            question, expected = draw.choice(solo if others_too else first)
            n_events = draw.randrange(1, 30) if draw.random() < LEAVES else None
            try:
                heard = visit(address, question, n_events if question.is_stream else None)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fault(question, f"{type(error).__name__}: {error}")
                continue
            with self._lock:
                self._judge(question, expected, heard)

    def _judge(self, question: Question, expected: Any, heard: Any) -> None:
        if isinstance(heard, Refusal):
            self.faults[f"{question.kind}: {heard}"[:200]] += 1
        elif isinstance(heard, Begun):
            self.left[question.model] += question.n_requests
            if not expected["text"].startswith(heard.text):
                self.faults[f"{question.kind}: begins otherwise than alone"] += 1
        elif heard != expected:
            self.faults[f"{question.kind}: another answer than alone"] += 1
        else:
            self.answered[question.kind] += 1
            self.requested[question.model] += question.n_requests

    def _fault(self, question: Question, why: str) -> None:
        with self._lock:
            self.faults[f"{question.kind}: {why}"[:200]] += 1

    def _look(self, address: str, pid: int) -> None:
        stats = _get(address, f"/stats?model={self.names[0]}")
        if stats["state"] != "ready":  # still loading
            return
        process = Path(f"/proc/{pid}")
        counts = [_count(process / folder) for folder in ("fd", "task")]
        spent = time.monotonic() - self._start
        self.looks.append(Look(spent, stats["resident_bytes"], *counts))
        if len(self.looks) % (4 * LOOKS_PER_CYCLE) == 0:
            n, n_wrong = sum(self.answered.values()), sum(self.faults.values())
            note(
                f"{spent:>6.0f} s  {n} right, {n_wrong} faults, {sum(self.left.values())} left  "
                f"{stats['resident_bytes'] / 1e6:.0f} MB  {counts[0]} files, {counts[1]} threads"
            )

    def _settle(self, address: str) -> None:
        """Nothing may be held for those who are gone."""
        end = time.monotonic() + SETTLE_S
        while True:
            stats = _get(address, f"/stats?model={self.names[0]}")
            held = {key: stats[key] for key in ("running", "waiting") if stats[key]}
            if stats["kv_blocks"]["used"]:
                held["blocks"] = stats["kv_blocks"]["used"]
            if not held:
                return
            if time.monotonic() > end:
                self.faults[f"held for nobody {SETTLE_S:g} s after the last visit: {held}"] += 1
                return
            time.sleep(0.05)

    def _judge_totals(self, address: str) -> None:
        """The server has counted what we have asked."""
        model, metrics = self.names[0], _get_text(address, "/metrics")
        self.totals = {
            reason: counter(metrics, "martlet_requests_total", model_name=model, reason=reason)
            for reason in ("stop", "length", "cancelled", "deadline", "error")
        }
        more = ("preemptions_total", "generation_tokens_total", "draft_tokens_total")
        self.totals |= {
            name: counter(metrics, f"martlet_{name}", model_name=model) for name in more
        }
        n_well = self.totals["stop"] + self.totals["length"]
        n_all, least = n_well + self.totals["cancelled"], self.requested[model]
        most = least + self.left[model]
        is_sound = not self.faults  # else not all were counted by us
        if self.totals["deadline"] or self.totals["error"]:
            self.faults[f"the server counts ends that nobody has seen: {self.totals}"] += 1
        if is_sound and not (least <= n_well and n_all <= most):
            self.faults[f"{least} whole and {most} begun requests, counted {self.totals}"] += 1

    def _judge_looks(self) -> None:
        """After the first quarter, the warm-up. Of files and threads compares peaks. The peak of
        memory is who happens to be loaded and how full their caches are; what it falls back to
        when the second model has gone must stay."""
        quarters: list[list[Look]] = [[], [], [], []]
        for look in self.looks:
            quarters[min(3, int(look.at_s / self.seconds * 4))].append(look)
        warm, second, third, last = quarters
        if not (warm and second and last):
            self.faults["too short: no look in a quarter of the time"] += 1
            return
        for name in ("n_files", "n_threads"):
            before, after = (
                max(getattr(look, name) or 0 for look in looks)
                for looks in (warm, [*second, *third, *last])
            )
            if after > before + 2:
                self.faults[f"{name} grew after the warm-up from {before} to {after}"] += 1
        low, lower = (min(look.resident_bytes for look in looks) for looks in (second, last))
        if lower > low * (1 + GROWN):
            self.faults[
                f"the least resident_bytes grew after the warm-up from {low} to {lower}"
            ] += 1

    def summary(self) -> dict[str, Any]:
        warm = [look for look in self.looks if look.at_s < self.seconds / WARM_UP]
        return {
            "seconds": self.seconds,
            "clients": self.n_clients,
            "right": sum(self.answered.values()),
            "right_by_kind": dict(self.answered),
            "left_within_the_answer": sum(self.left.values()),
            "faults": dict(self.faults),
            "peak_bytes_in_warm_up": max((look.resident_bytes for look in warm), default=None),
            "peak_bytes": max((look.resident_bytes for look in self.looks), default=None),
            "least_bytes": min((look.resident_bytes for look in self.looks), default=None),
            "most_files": max((look.n_files or 0 for look in self.looks), default=None),
            "most_threads": max((look.n_threads or 0 for look in self.looks), default=None),
            "first_model_by_metrics": self.totals,
            "resident_bytes": [[round(look.at_s), look.resident_bytes] for look in self.looks],
        }


class Refused(MartletError):
    """A question that is not answered at all: the models are no good for this."""


class Refusal(NamedTuple):
    status: int
    body: str

    def __str__(self) -> str:
        return f"status {self.status}: {self.body}"


class Begun(NamedTuple):
    """What was heard by one who left."""

    text: str


def visit(address: str, question: Question, leaves_after: int | None = None) -> Any:
    """The answer as far as it counts, or Begun, or Refusal."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=SILENT_S)) as connection:
        body = json.dumps(question.body)
        connection.request("POST", question.path, body, {"Content-Type": JSON_TYPE})
        with contextlib.closing(connection.getresponse()) as response:
            if response.status != 200:
                return Refusal(response.status, response.read(300).decode(errors="replace"))
            if not question.is_stream:
                return what_counts(json.loads(response.read()))
            heard, n_events = Streamed(), 0
            for line in response:
                n_events += heard.line(line)
                if leaves_after is not None and n_events >= leaves_after:
                    return Begun(heard.text)
    if heard.error or not heard.is_over:
        return Refusal(200, heard.error or "the stream broke off before [DONE]")
    return heard.answer


def counter(metrics: str, name: str, **labels: str) -> float:
    """The sum over all series of `name` that have these labels."""
    total = 0.0
    for line in metrics.splitlines():
        found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def _count(folder: Path) -> int | None:
    """None where the system does not tell."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return None


def _get(address: str, path: str) -> Any:
    return json.loads(_get_text(address, path))


def _get_text(address: str, path: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=SILENT_S)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise http.client.HTTPException(f"{path}: status {response.status}: {text[:200]}")
        return text
