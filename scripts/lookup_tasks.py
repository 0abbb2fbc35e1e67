"""Prompts with outputs that repeat more or less of them: read from files, or made of random tokens.
Owns the tasks and the share that repeats; must not know how they are run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.quant.errors import MartletError
from martlet.scripts.speculate_runs import Task

if TYPE_CHECKING:
    from martlet.runtime.tokenizer import Tokenizer

SAME = 4
"""Tokens of a run that counts as repeated, at least."""
COPIED_RUN = 48
"""Tokens that a made output copies at a time."""
PROMPT_TOKENS = 256
FIRST_TOKEN = 300
"""Of made ones: those before it may be control tokens or bytes."""


@dataclass(frozen=True)
class NamedTask:
    name: str
    task: Task
    share: float
    """Of the output's tokens, those that repeat the prompt."""


def named(name: str, prompt: list[int], output: list[int]) -> NamedTask:
    return NamedTask(name, Task(prompt, output), repeated_share(prompt, output))


def repeated_share(prompt: Sequence[int], output: Sequence[int]) -> float:
    """Of the output's tokens those in runs of SAME and more that the prompt has, too."""
    known = {tuple(prompt[i : i + SAME]) for i in range(len(prompt) - SAME + 1)}
    repeated: set[int] = set()
    for i in range(len(output) - SAME + 1):
        if tuple(output[i : i + SAME]) in known:
            repeated.update(range(i, i + SAME))
    return len(repeated) / len(output)


def read_tasks(path: Path, tokenizer: Tokenizer) -> Iterator[NamedTask]:
    """JSON lines of name, prompt and output. Raises MartletError where one is none."""
    for n, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
            name, prompt, output = (str(fields[key]) for key in ("name", "prompt", "output"))
        except (ValueError, KeyError, TypeError) as error:
            raise MartletError(
                f"{path}, line {n}: expected a JSON object with name, prompt and output"
            ) from error
        ids = tokenizer.encode(prompt, add_special=True, parse_special=False)
        yield named(name, ids, tokenizer.encode(output, add_special=False, parse_special=False))


def copying_task(share: float, tokenizer: Tokenizer, n_output: int) -> NamedTask:
    """An output that copies runs from anywhere in its prompt, between tokens of no connection."""
    rng = random.Random(f"{share}")
    first = min(FIRST_TOKEN, tokenizer.vocab_size // 2)
    words = [i for i in range(first, tokenizer.vocab_size) if i not in tokenizer.eog_ids]

    def fresh(n: int) -> list[int]:
        return rng.choices(words, k=n)

    prompt, n_copied = fresh(PROMPT_TOKENS), 0
    output: list[int] = []
    while len(output) < n_output:
        if n_copied + COPIED_RUN / 2 < share * (len(output) + COPIED_RUN):
            start = rng.randrange(PROMPT_TOKENS - COPIED_RUN)
            output += prompt[start : start + COPIED_RUN]
            n_copied += COPIED_RUN
        else:
            output += fresh(4)
    return named(f"copied {share:g}", prompt, output[:n_output])
