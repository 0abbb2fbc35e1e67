"""`martlet bench-speculate`: what guessing tokens gives here, by how often guesses are right.
Owns the command and the table; the drafter is scripted_drafter.py."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.scripts import options
from martlet.scripts.console import note, print_json

if TYPE_CHECKING:
    from martlet.runtime.model import Model
    from martlet.runtime.speculation import Speculation
    from martlet.runtime.step_costs import StepCosts

PROMPT_TOKENS = 16
DEFINITIONS = {
    "plain": "output tokens per second of all together, after the first ones, without guesses",
    "auto": "the same with as many guesses as the measured costs say",
    "ratio": "auto / plain of neighbouring runs: median, least and most",
    "expected": "calculated from acceptance and the costs measured at start: the best over all "
    "lengths of (1 + a + … + a^g) * cost(n) / cost(n * (1 + g)); 1 where that is less than 1",
    "acceptance": "the probability that a guessed token is the right one, as the drafter is told",
}


@dataclass
class Row:
    acceptance: float
    batch: int
    plain: float = 0.0
    auto: float = 0.0
    ratios: list[float] = field(default_factory=list)
    expected: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def ratio(self) -> tuple[float, float, float]:
        return statistics.median(self.ratios), min(self.ratios), max(self.ratios)


@options.with_load_options
def bench_speculate(
    model: options.ModelArgument,
    acceptance: Annotated[str, typer.Option(help="Of guessed tokens.")] = "0,0.3,0.6,0.8,1",
    batch: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,2,4,8",
    decode: Annotated[int, typer.Option(min=2, help="Output tokens of each.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs of runs; the median counts.")] = 5,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Decoding of MODEL with and without guesses, in turn, for guesses of known acceptance."""
    from martlet.scripts.generate import open_model

    batches = [int(word) for word in batch.split(",")]
    chances = [float(word) for word in acceptance.split(",")]
    context = PROMPT_TOKENS + decode + 1
    arguments = load.arguments(context=context)
    with open_model(model, **arguments) as opened:
        costs = measured_costs(opened)
        rows = list(measure(opened, batches, chances, decode, repeat))
    if as_json:
        print_json(
            {"costs": costs, "rows": [asdict(row) for row in rows], "definitions": DEFINITIONS}
        )
        return
    print(f"cost of a step of n rows, of one row: {costs}")
    print("acceptance  batch  plain t/s  auto t/s  ratio (least to most)  expected  accepted")
    for row in rows:
        median, least, most = row.ratio
        share = f"{row.accepted}/{row.drafted}"
        print(
            f"{row.acceptance:10.2f}  {row.batch:5}  {row.plain:9.1f}  {row.auto:8.1f}"
            f"  {median:5.2f} ({least:.2f} to {most:.2f})  {row.expected:8.2f}  {share}"
        )


def measured_costs(model: Model) -> dict[int, float]:
    costs = new_costs(model)
    return {n: round(costs.of(n) / costs.of(1), 2) for n in (1, 2, 3, 4, 6, 8, 12, 16)}


def new_costs(model: Model) -> StepCosts:
    from martlet.runtime.step_costs import StepCosts

    return StepCosts.measure(model.executor, len(model.adapters))


def measure(
    model: Model, batches: Sequence[int], chances: Sequence[float], decode: int, repeat: int
) -> Iterator[Row]:
    from martlet.runtime.speculation import Speculation
    from martlet.scripts.scripted_drafter import ScriptedDrafter

    for n in batches:
        _, outputs = timed_run(model, n, decode, None)
        for chance in chances:
            row = Row(chance, n)
            costs = new_costs(model)
            row.expected = expected_ratio(costs, chance, n)
            plain, auto = [], []
            for _ in range(repeat):
                speculation = Speculation(ScriptedDrafter(outputs, chance), costs)
                plain.append(timed_run(model, n, decode, None)[0])
                seconds, said = timed_run(model, n, decode, speculation)
                auto.append(seconds)
                if said != outputs:
                    raise AssertionError("a guess has changed a text")
                row.ratios.append(plain[-1] / seconds)
                row.drafted += speculation.counts.drafted
                row.accepted += speculation.counts.accepted
            tokens = n * (decode - 1)
            row.plain, row.auto = (tokens / statistics.median(s) for s in (plain, auto))
            note(f"acceptance {chance:g}, batch {n}: {row.ratio[0]:.2f}")
            yield row


def expected_ratio(costs: StepCosts, chance: float, n: int) -> float:
    from martlet.runtime.speculation import MOST

    alone = costs.of(n)
    gains = [
        sum(chance**k for k in range(g + 1)) * alone / costs.of(n * (1 + g))
        for g in range(MOST + 1)
    ]
    return max(gains)


def timed_run(
    model: Model, n: int, decode: int, speculation: Speculation | None
) -> tuple[float, dict[str, list[int]]]:
    """Seconds from the step after all first tokens to the last, and what was said."""
    from martlet.runtime.engine import Engine
    from martlet.runtime.events import TokenEvent
    from martlet.runtime.sampling_params import SamplingParams

    engine = Engine(
        model.executor,
        model.tokenizer,
        context=model.context,
        prefix_reuse=False,
        speculation=speculation,
    )
    said: dict[str, list[int]] = {str(i): [] for i in range(n)}

    def listener(name: str) -> Any:
        def listen(event: object) -> None:
            if isinstance(event, TokenEvent):
                said[name].append(event.token_id)

        return listen

    rng = random.Random(0)
    for name in said:
        prompt = [rng.randrange(3, model.tokenizer.vocab_size) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=decode, temperature=0.0, ignore_eos=True)
        engine.submit(prompt, params, listener(name), request_id=name)
    while not all(said.values()):
        engine.step()
    start = time.perf_counter()
    while engine.step():
        pass
    return time.perf_counter() - start, said


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-speculate", *sys.argv[1:]])
