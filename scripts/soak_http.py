"""`martlet soak URL`: many streaming clients at once, some of which leave, of a server that runs.
Owns the clients, the probe of /health and the verdict; knows of the server nothing but its HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from martlet.runtime.aggregates import percentile
from martlet.scripts.console import note
from martlet.scripts.soak_questions import words

PATH = "/v1/completions"
N_QUESTIONS = 24
N_PREFIXES = 4
MOST_PROMPT_WORDS = 60
MOST_OUTPUT = 64
LEAVES = 0.4  # of the visits, before the first event, after it or anywhere in the answer
WARM_UP = 4  # the first quarter of the visits
SILENT_S = 120.0
"""Longer without a byte is stuck; it is far beyond the server's signs of life."""
SETTLE_S = 10.0
PROBE_EVERY_S = 0.05
LOOK_EVERY_S = 0.5


class Question(NamedTuple):
    """The same one has the same answer, whoever else is there and whoever leaves."""

    prompt: str
    max_tokens: int
    seed: int

    def body(self) -> bytes:
        asked = {**self._asdict(), "temperature": 0.8, "ignore_eos": True, "stream": True}
        return json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()


class Heard(NamedTuple):
    """What came of an answer."""

    question: int
    text: str
    is_whole: bool


class Lost(Exception):
    """An answer that is not as it must be."""


@dataclass
class HttpSoak:
    """Visits to the server at `address` (host:port)."""

    address: str
    n_clients: int
    seed: int
    silent_s: float = SILENT_S
    heard: list[Heard] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Resident bytes of the server, from the end of the warm-up on."""
    n_tokens: int = 0
    seconds: float = 0.0
    left_over: dict[str, Any] = field(default_factory=dict)
    """What the server still holds when everybody is gone and it had time to see that."""

    def serve(self, n_visits: int) -> None:
        start = time.monotonic()
        self._questions = _questions(Random(self.seed))
        self._left = iter(range(n_visits))
        self._lock, self._over = threading.Lock(), threading.Event()
        clients = [
            threading.Thread(target=self._visit_often, args=(nth,), daemon=True)
            for nth in range(self.n_clients)
        ]
        probe = threading.Thread(target=self._probe, daemon=True)
        for thread in (probe, *clients):
            thread.start()
        self._watch(clients, n_visits, start)
        self.seconds = time.monotonic() - start
        self._over.set()
        probe.join()
        self._settle()
        self.sizes.append(self._stats()["resident_bytes"])

    def faults(self, tolerance_bytes: int, most_health_ms: float) -> list[str]:
        """What is wrong, each in a line; nothing if all is well."""
        found = [f"{n} visits: {why}" for why, n in Counter(self.lost).most_common()]
        found += [
            f"question {nth} was not always answered the same"
            for nth in range(N_QUESTIONS)
            if not self._agree(nth)
        ]
        if self.left_over:
            found.append(f"held for nobody {SETTLE_S:g} s after the last visit: {self.left_over}")
        if self.grown > tolerance_bytes:
            found.append(
                f"the server's memory grew by {self.grown / 1e6:.1f} MB after warm-up, allowed "
                f"are {tolerance_bytes / 1e6:.1f}"
            )
        if self.p99_ms > most_health_ms:
            found.append(f"p99 of /health was {self.p99_ms:.0f} ms, allowed are {most_health_ms:g}")
        return found

    def summary(self) -> str:
        n_whole = sum(each.is_whole for each in self.heard)
        return (
            f"{n_whole} answers heard to the end, {len(self.heard) - n_whole} left before; "
            f"{self.n_tokens} events, {self.seconds:.0f} s; /health p50 "
            f"{percentile(self.health_ms, 50) or 0:.1f}, p99 {self.p99_ms:.1f}, worst "
            f"{max(self.health_ms):.1f} ms of {len(self.health_ms)}; memory grew by "
            f"{self.grown / 1e6:.1f} MB to {max(self.sizes) / 1e6:.0f} MB after warm-up"
        )

    @property
    def grown(self) -> int:
        return max(self.sizes) - self.sizes[0]

    @property
    def p99_ms(self) -> float:
        return percentile(self.health_ms, 99) or 0.0

    def _agree(self, nth: int) -> bool:
        """Whole answers are equal, and what those who left have heard is how they begin."""
        texts = [each for each in self.heard if each.question == nth]
        whole = {each.text for each in texts if each.is_whole}
        return len(whole) < 2 and all(
            text.startswith(each.text) for text in whole for each in texts
        )

    def _watch(self, clients: list[threading.Thread], n_visits: int, start: float) -> None:
        shown = 0
        while any(client.is_alive() for client in clients):
            time.sleep(LOOK_EVERY_S)
            n = len(self.heard) + len(self.lost)
            if n < n_visits // WARM_UP:
                continue
            self.sizes.append(self._stats()["resident_bytes"])
            if n * 10 // n_visits > shown:
                shown = n * 10 // n_visits
                spent = time.monotonic() - start
                note(f"{n:>6} visits  {self.sizes[-1] / 1e6:>8.1f} MB resident  {spent:.0f} s")

    def _settle(self) -> None:
        end = time.monotonic() + SETTLE_S
        while True:
            stats = self._stats()
            held = {key: stats[key] for key in ("running", "waiting") if stats[key]}
            if stats["kv_blocks"]["used"]:
                held["blocks"] = stats["kv_blocks"]["used"]
            if not held or time.monotonic() > end:
                self.left_over = held
                return
            time.sleep(0.05)

    def _visit_often(self, nth: int) -> None:
        draw = Random(f"{self.seed}-{nth}")
        while True:
            with self._lock:
                if next(self._left, None) is None:
                    return
            question = draw.randrange(N_QUESTIONS)
            leaves = draw.random() < LEAVES
            n_events = draw.choice((0, 1, draw.randrange(MOST_OUTPUT))) if leaves else None
            try:
                self.heard.append(self._visit(question, n_events))
            except (OSError, http.client.HTTPException, ValueError, Lost) as error:
                self.lost.append(f"{type(error).__name__}: {error}"[:200])

    def _visit(self, nth: int, leaves_after: int | None) -> Heard:
        question, text, usage, reason = self._questions[nth], "", None, None
        with contextlib.closing(self._connect(self.silent_s)) as connection:
            connection.request("POST", PATH, question.body(), {"Content-Type": "application/json"})
            if leaves_after == 0:
                return Heard(nth, "", False)
            with contextlib.closing(connection.getresponse()) as response:
                if response.status != 200:
                    raise Lost(f"status {response.status}: {response.read()[:150]!r}")
                for n_events, event in enumerate(_events(response), 1):
                    if "error" in event:
                        raise Lost(str(event["error"]))
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
                    with self._lock:
                        self.n_tokens += 1
                    if n_events == leaves_after:
                        return Heard(nth, text, False)
        n_output = (usage or {}).get("completion_tokens")
        if (reason, n_output) != ("length", question.max_tokens):
            raise Lost(f"end {reason} after {n_output} tokens of {question.max_tokens}")
        return Heard(nth, text, True)

    def _probe(self) -> None:
        while not self._over.wait(PROBE_EVERY_S):
            start = time.perf_counter()
            try:
                self._get("/health")
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(f"/health: {type(error).__name__}: {error}")
            self.health_ms.append((time.perf_counter() - start) * 1e3)

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self._get("/stats"))
        return stats

    def _get(self, path: str) -> bytes:
        """Over a connection of its own, as anybody who just comes."""
        with contextlib.closing(self._connect(self.silent_s)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{path}: status {response.status}")
            return response.read()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=timeout_s)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise Lost("the stream broke off before [DONE]")


def _questions(draw: Random) -> list[Question]:
    """Prompts that begin alike, so that they share blocks."""
    prefixes = [words(draw, MOST_PROMPT_WORDS) for _ in range(N_PREFIXES)]
    return [
        Question(
            prompt=draw.choice(prefixes) + words(draw, MOST_PROMPT_WORDS),
            max_tokens=draw.randrange(1, MOST_OUTPUT + 1),
            seed=seed,
        )
        for seed in range(N_QUESTIONS)
    ]
