"""What a step of a model costs on a machine: what `martlet bench-steps` keeps for `simulate`.

Owns: the table, the formula that reads it, its file. Must not know: how it was measured, requests.

A step has rows of streams (one each, whose logits are read) and rows of prompts:

    seconds = alone(streams) + prompt(all rows) - prompt(streams)
              + (tokens before the streams' rows) * alone_growth(streams)
              + (tokens before the prompts' rows) * prompt_growth(rows of prompts)

alone and prompt are whole steps at the beginning of a context; the growths say what each token
before a row adds. Between measured numbers of rows it is interpolated; beyond the last, a row costs
what the last ones do.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from martlet.quant.errors import MartletError

FORM = 1
TABLES = ("alone", "alone_growth", "prompt", "prompt_growth")


class CostsError(MartletError):
    """A file that holds no costs, or costs that cannot be."""


@dataclass(frozen=True)
class Table:
    """Seconds by number of rows, from 1 row on."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        is_rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if (
            not self.rows
            or self.rows[0] != 1
            or not is_rising
            or len(self.rows) != len(self.seconds)
        ):
            raise CostsError(f"{self.rows} are no numbers of rows from 1 on with seconds of each")
        if not all(math.isfinite(each) and each >= 0 for each in self.seconds):
            raise CostsError(f"{self.seconds} are no seconds")

    def at(self, n: int) -> float:
        if n < 1:
            return 0.0
        if len(self.rows) == 1:
            return self.seconds[0]
        place = min(max(bisect.bisect_left(self.rows, n), 1), len(self.rows) - 1)
        (n0, n1), (s0, s1) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return max(0.0, s0 + (s1 - s0) * (n - n0) / (n1 - n0))


@dataclass(frozen=True)
class Shape:
    """What the scheduler and the pool have to know of a model as it is served."""

    block_tokens: int
    n_blocks: int
    max_rows: int
    vocab_size: int
    context: int
    n_window_blocks: int = 0
    window: int = 0
    n_states: int = 0
    n_guesses: int = 0
    sees_ahead: bool = False

    def copy_block(self, src: int, dst: int, window: tuple[int, int] | None = None) -> None:
        """Nothing is in the blocks."""

    def copy_state(self, src: int, dst: int) -> None:
        """Nor in the states."""


@dataclass(frozen=True)
class Costs:
    shape: Shape
    alone: Table
    alone_growth: Table
    prompt: Table
    prompt_growth: Table
    front_s: float = 0.0
    """From a request's arrival to the queue of the engine: its bytes are read and made tokens."""
    conditions: dict[str, Any] = field(default_factory=dict)

    def seconds(self, streams_at: Sequence[int], prompts: Sequence[tuple[int, int]]) -> float:
        """streams_at: tokens before the row of each stream. prompts: of each, the tokens before its
        first row, and its rows."""
        n_streams, n_rows = len(streams_at), sum(n for _, n in prompts)
        found = self.alone.at(n_streams) + sum(streams_at) * self.alone_growth.at(n_streams)
        if n_rows:
            before = sum(n * at for at, n in prompts)
            found += self.prompt.at(n_streams + n_rows) - self.prompt.at(n_streams)
            found += before * self.prompt_growth.at(n_rows)
        return found

    def as_json(self) -> str:
        return json.dumps({"form": FORM, **asdict(self)}, indent=1) + "\n"


def costs_of(text: str, name: str = "the text") -> Costs:
    """Of as_json's text; raises CostsError."""
    try:
        given = json.loads(text)
        if given.pop("form") != FORM:
            raise CostsError(f"{name} has another form than {FORM}; measure anew with bench-steps")
        shape = Shape(**given.pop("shape"))
        tables = {
            name: Table(*(tuple(given[name][part]) for part in ("rows", "seconds")))
            for name in TABLES
        }
        return Costs(**{**given, **tables, "shape": shape})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostsError(f"{name} holds no costs of steps ({error!r})") from None


def median_of(several: Sequence[Costs]) -> Costs:
    """The median of each figure, of the same model measured by several processes at once."""

    def middle(values: Sequence[float]) -> float:
        ordered = sorted(values)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    first = several[0]
    tables = {}
    for name in TABLES:
        columns = zip(*(getattr(each, name).seconds for each in several), strict=True)
        tables[name] = Table(getattr(first, name).rows, tuple(map(middle, columns)))
    front_s = middle([each.front_s for each in several])
    return Costs(first.shape, **tables, front_s=front_s, conditions=first.conditions)
