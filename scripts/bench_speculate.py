"""`martlet bench-speculate`: what guessing tokens gives here, by how often guesses are right, or on
tasks whose outputs repeat more or less of their prompts.
Owns the command and the tables; runs are speculate_runs.py, tasks lookup_tasks.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.runtime.errors import MartletError
from martlet.scripts import options
from martlet.scripts.console import print_json

if TYPE_CHECKING:
    from martlet.runtime.drafts import Drafter
    from martlet.runtime.model import Model
    from martlet.runtime.step_costs import StepCosts
    from martlet.scripts.speculate_runs import Outputs, Task

PROMPT_TOKENS = 16
DEFINITIONS = {
    "plain": "output tokens per second of all together, after the first ones, without guesses",
    "auto": "the same with as many guesses as the measured costs say",
    "ratio": "auto / plain, each run with guesses against the mean of its neighbours without: "
    "geometric mean, and 95 % interval (Student's, of logarithms)",
    "control": "the same of neighbouring runs without guesses: what the machine's noise gives",
    "expected": "calculated from acceptance and the costs measured at start: the best over all "
    "lengths of (1 + a + … + a^g) * cost(n) / cost(n * (1 + g)); 1 where that is less than 1",
    "acceptance": "the probability that a guessed token is the right one, as the drafter is told",
    "share": "of an output's tokens those in runs of 4 and more that its prompt has, too",
}

WIDTHS = {"task": 20, "ratio": 20, "control": 20}


@options.with_load_options
def bench_speculate(
    model: options.ModelArgument,
    acceptance: Annotated[str, typer.Option(help="Of guessed tokens.")] = "0,0.3,0.6,0.8,1",
    batch: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,2,4,8",
    decode: Annotated[int, typer.Option(min=2, help="Output tokens of each.")] = 64,
    repeat: Annotated[int, typer.Option(min=2, help="Pairs of runs; the mean counts.")] = 5,
    lookup: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Prompt lookup instead: JSON lines of name, prompt and output; each output is "
            "dictated. Again for more files.",
        ),
    ] = None,
    lookup_share: Annotated[
        str | None,
        typer.Option(help="Prompt lookup instead: outputs of which such shares are copied."),
    ] = None,
    *,
    own: Annotated[bool, typer.Option(help="Guesses of the model's own block instead.")] = False,
    draft: options.DraftOption = None,
    draft_vocab: options.DraftVocabOption = None,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """Decoding of MODEL with and without guesses, in turn: guesses of known acceptance, or those of
    prompt lookup, of a model (--draft), or of the model's own block (--own)."""
    from martlet.runtime.nextn_drafter import own_drafter
    from martlet.scripts.generate import open_drafter, open_model

    batches = [int(word) for word in batch.split(",")]
    chances = [float(word) for word in acceptance.split(",")]
    shares = [float(word) for word in lookup_share.split(",")] if lookup_share else []
    is_lookup = bool(lookup or shares)
    if sum((is_lookup, draft is not None, own)) > 1:
        raise MartletError("one kind of guess a run: --lookup or --lookup-share, --draft, or --own")
    if is_lookup and draft_vocab:
        raise MartletError("--draft-vocab is for --draft or --own: a lookup has no output matrix")
    context = 2048 if is_lookup else PROMPT_TOKENS + decode + 1
    with (
        open_model(model, **load.arguments(context=context)) as opened,
        open_drafter(opened, draft, draft_vocab=draft_vocab) as drafter,
    ):
        drafter = drafter or (own_drafter(opened, "auto") if own else None)
        if own and drafter is None:
            raise MartletError(
                "the file has no block that guesses (`martlet inspect` shows nextn tensors where "
                "there is one): leave --own out, or take another file"
            )
        one_row_ms, costs = measured_costs(opened)
        if is_lookup:
            cases = lookup_cases(opened, lookup or [], shares, batches, decode)
        elif drafter:
            cases = drafter_cases(opened, drafter, batches)
        else:
            cases = scripted_cases(opened, batches, chances)
        if not as_json:
            print(f"a step of one row takes {one_row_ms:.1f} ms; steps of n rows, of it: {costs}")
        rows = []
        for case in cases:
            rows.append(measured(opened, case, decode, repeat))
            if not as_json:
                show(rows[-1], with_names=len(rows) == 1)
    if as_json:
        print_json(
            {
                "one_row_ms": one_row_ms,
                "costs": costs,
                "rows": rows,
                "definitions": DEFINITIONS,
            }
        )


def measured_costs(model: Model) -> tuple[float, dict[int, float]]:
    """Milliseconds of a step of one row, and what steps of more rows take, of that."""
    from martlet.scripts.speculate_runs import new_costs

    costs = new_costs(model)
    alone_s = costs.of(1)
    return 1e3 * alone_s, {n: round(costs.of(n) / alone_s, 2) for n in (1, 2, 3, 4, 6, 8, 12, 16)}


@dataclass
class Case:
    names: dict[str, Any]
    """What stands in the first columns."""
    tasks: Sequence[Task]
    drafter_of: Callable[[Outputs], Drafter]
    """By what is said without guesses."""
    expected: Callable[[StepCosts], float] | None = None


def scripted_cases(
    model: Model, batches: Sequence[int], chances: Sequence[float]
) -> Iterator[Case]:
    from martlet.scripts.scripted_drafter import ScriptedDrafter

    for n, chance in product(batches, chances):
        yield Case(
            {"acceptance": chance, "batch": n},
            random_tasks(n, model.tokenizer.vocab_size),
            partial(ScriptedDrafter, acceptance=chance),
            partial(expected_ratio, chance=chance, n=n),
        )


def drafter_cases(model: Model, drafter: Drafter, batches: Sequence[int]) -> Iterator[Case]:
    for n in batches:
        tasks = random_tasks(n, model.tokenizer.vocab_size)
        yield Case({"drafter": drafter.name, "batch": n}, tasks, lambda _: drafter)


def lookup_cases(
    model: Model, files: Sequence[Path], shares: Sequence[float], batches: Sequence[int], n: int
) -> Iterator[Case]:
    from martlet.runtime.drafts import PromptLookup
    from martlet.scripts.lookup_tasks import copying_task, read_tasks

    tasks = [task for path in files for task in read_tasks(path, model.tokenizer)]
    tasks += [copying_task(share, model.tokenizer, n) for share in shares]
    for one, batch in product(tasks, batches):
        names = {"task": one.name, "share": one.share, "batch": batch}
        yield Case(names, [one.task] * batch, lambda _: PromptLookup())


def random_tasks(n: int, vocab_size: int) -> list[Task]:
    from martlet.scripts.speculate_runs import Task

    rng = random.Random(0)
    return [Task([rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)]) for _ in range(n)]


def measured(model: Model, case: Case, decode: int, repeat: int) -> dict[str, Any]:
    """A row of the table."""
    from martlet.runtime.speculation import Speculation
    from martlet.scripts.speculate_runs import in_turn, new_costs

    costs = new_costs(model)
    row = dict(case.names)
    if case.expected:
        row["expected"] = case.expected(costs)
    pairs = in_turn(
        model,
        case.tasks,
        decode,
        repeat,
        lambda outputs: Speculation(case.drafter_of(outputs), costs),
    )
    row |= {"plain": pairs.per_second(pairs.plain), "auto": pairs.per_second(pairs.auto)}
    row |= {"ratio": asdict(pairs.ratio), "control": asdict(pairs.control)}
    row |= {"drafted": pairs.drafted, "accepted": pairs.accepted}
    return row


def expected_ratio(costs: StepCosts, chance: float, n: int) -> float:
    from martlet.runtime.speculation import MOST

    alone = costs.of(n)
    gains = [
        sum(chance**k for k in range(g + 1)) * alone / costs.of(n * (1 + g))
        for g in range(MOST + 1)
    ]
    return max(gains)


def show(row: dict[str, Any], *, with_names: bool) -> None:
    widths = [max(len(name), WIDTHS.get(name, 8)) for name in row]
    for line in [list(row)] * with_names + [[_cell(value) for value in row.values()]]:
        words = (word.rjust(width) for word, width in zip(line, widths, strict=True))
        print("  ".join(words), flush=True)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['value']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["bench-speculate", *sys.argv[1:]])
