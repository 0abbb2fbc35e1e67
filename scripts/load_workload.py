"""What a load asks for: texts of given lengths, conversations, and when each is due.
Owns lengths, words and arrivals; must not know who is asked or what an answer took."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from martlet.quant.errors import MartletError

COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why "
    "things help put years different away again off went old number great tell men say small every "
    "found still between name should home big give air line set own under read last never us left "
    "end along while might next sound below saw something thought both few those always looked "
    "show large often together asked house world going want school important until form food keep"
)
WORDS = COMMON.split()
TRACE_FIELDS = {
    "at_s": ("at_s", 1.0),
    "timestamp": ("at_s", 1e-3),  # Mooncake's traces: milliseconds
    "prompt_tokens": ("prompt", 1.0),
    "input_length": ("prompt", 1.0),
    "output_tokens": ("output", 1.0),
    "output_length": ("output", 1.0),
}
TRIES = 16  # letters to fill up with, where words are no single tokens
Count = Callable[[str], int]


class WorkloadError(MartletError):
    """A length, a trace or an option that says nothing that could be asked."""


@dataclass(frozen=True)
class Lengths:
    """`100`, `50-200` (all alike likely) or `100~30` (normal: mean and deviation, at least 1)."""

    text: str
    low: float
    high: float
    is_normal: bool = False

    @classmethod
    def parse(cls, text: str) -> Lengths:
        match = re.fullmatch(r"(\d+)(?:([-~])(\d+))?", text.strip())
        if not match or not int(match[1]):
            raise WorkloadError(f"{text!r} is no length; write 100, 50-200 or 100~30, from 1 on")
        first, second = int(match[1]), int(match[3] or match[1])
        if match[2] != "~" and second < first:
            raise WorkloadError(f"{text!r} ends below its start")
        return cls(text.strip(), first, second, match[2] == "~")

    def draw(self, draw: Random) -> int:
        if self.is_normal:
            return max(1, round(draw.gauss(self.low, self.high)))
        return draw.randint(int(self.low), int(self.high))


@dataclass(frozen=True)
class Shape:
    """How the requests of a workload look, in tokens."""

    prompt: Lengths
    output: Lengths
    prefix: int = 0
    """Tokens that prompts begin with, beyond their own."""
    n_prefixes: int = 1
    turns: int = 1

    def conditions(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt.text,
            "output_tokens": self.output.text,
            "prefix_tokens": self.prefix,
            "n_prefixes": self.n_prefixes if self.prefix else 0,
            "turns": self.turns,
        }


@dataclass(frozen=True)
class Turn:
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Its turns follow each other, each after the answer to the one before."""

    turns: tuple[Turn, ...]
    at_s: float | None = None
    """When the first is due, since the start; None: when a stream is free."""


@dataclass(frozen=True)
class Trace:
    """What a file recorded of somebody's day."""

    at_s: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Load:
    """Closed loop: n_streams ask one after the other. Open loop: rate_per_s, whoever is ready."""

    n_streams: int | None = None
    rate_per_s: float | None = None
    burstiness: float = 1.0
    """Shape of the gamma law of gaps: 1 is Poisson, below 1 comes in bursts."""
    trace: tuple[Trace, ...] = ()
    trace_name: str = ""

    @property
    def label(self) -> str:
        if self.trace:
            return f"trace {self.trace_name}"
        if self.rate_per_s is None:
            return f"{self.n_streams} streams"
        law = "Poisson" if self.burstiness == 1 else f"gamma {self.burstiness:g}"
        return f"{self.rate_per_s:g}/s {law}"

    @property
    def amount(self) -> float:
        """Where it stands on the axis of a plot."""
        return self.rate_per_s or self.n_streams or len(self.trace)


class Writer:
    """Texts of an exact number of tokens where `count` can tell, else of so many words."""

    def __init__(self, count: Count | None = None) -> None:
        self._count = count or (lambda text: len(text.split()))
        base = self._count("the")
        self._words = [w for w in WORDS if self._count(f"the {w}") == base + 1] or WORDS

    def write(self, n_tokens: int, draw: Random, before: str = "") -> str:
        """Further text: `before` with it has n_tokens more, as near as words and letters come to
        that. What is put before every text, as BOS, counts to a text that has nothing before it."""
        words = draw.choices(self._words, k=n_tokens)
        most = n_tokens + (self._count(before) if before else 0)

        def text_of(n: int) -> str:
            return " ".join([before, *words[:n]] if before else words[:n])

        n = bisect.bisect_right(range(n_tokens + 1), most, key=lambda n: self._count(text_of(n)))
        text = text_of(n - 1 if n > 1 or before else 1)  # an empty prompt is none
        for _ in range(TRIES):
            if self._count(text) >= most:
                break
            text += "e"
        return text[len(before) :]


def make_workload(
    shape: Shape, load: Load, n_requests: int, seed: str, count: Count | None = None
) -> list[Conversation]:
    """n_requests in all, in conversations of shape.turns; the same seed gives the same."""
    draw, writer = Random(seed), Writer(count)
    # Prefixes stay over repeats, whose prompts do not.
    shared = Random(f"prefix {shape.prefix}")
    prefixes = [writer.write(shape.prefix, shared) for _ in range(shape.n_prefixes)]
    lengths = [(each.prompt, each.output) for each in load.trace] or [
        (shape.prompt.draw(draw), shape.output.draw(draw)) for _ in range(n_requests)
    ]
    size = 1 if load.trace else shape.turns
    starts = due_times(load, -(-len(lengths) // size), draw)
    conversations = []
    for nth, at_s in enumerate(starts):
        turns: list[Turn] = []
        for n_prompt, n_output in lengths[nth * size : (nth + 1) * size]:
            before = draw.choice(prefixes) if shape.prefix and not turns else ""
            turns.append(Turn(before + writer.write(n_prompt, draw, before), n_output))
        conversations.append(Conversation(tuple(turns), at_s))
    return conversations


def due_times(load: Load, n: int, draw: Random) -> Sequence[float | None]:
    if load.trace:
        return [each.at_s - load.trace[0].at_s for each in load.trace]
    if load.rate_per_s is None:
        return [None] * n
    at_s, times = 0.0, []
    for _ in range(n):
        times.append(at_s)
        at_s += draw.gammavariate(load.burstiness, 1 / (load.rate_per_s * load.burstiness))
    return times


def read_trace(path: Path) -> tuple[Trace, ...]:
    """One JSON object a line: at_s, prompt_tokens, output_tokens, or Mooncake's names."""
    found: list[Trace] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            fields = {
                TRACE_FIELDS[key][0]: float(value) * TRACE_FIELDS[key][1]
                for key, value in given.items()
                if key in TRACE_FIELDS
            }
            each = Trace(fields["at_s"], int(fields["prompt"]), int(fields["output"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            names = "at_s, prompt_tokens and output_tokens"
            raise WorkloadError(f"{path}, line {number}: no {names} ({error!r})") from None
        if each.prompt < 1 or each.output < 1 or (found and each.at_s < found[-1].at_s):
            raise WorkloadError(f"{path}, line {number}: lengths below 1, or earlier than before")
        found.append(each)
    if not found:
        raise WorkloadError(f"{path} holds no requests")
    return tuple(found)
