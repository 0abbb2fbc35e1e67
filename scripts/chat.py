"""`martlet chat`: a conversation in the terminal, through the model's own chat template."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import note, write_text
from martlet.scripts.figures import figures, figures_line

if TYPE_CHECKING:
    from martlet.runtime.engine import Engine
    from martlet.runtime.model import Model
    from martlet.runtime.sampling_params import SamplingParams

HELP = "Ctrl-C ends an answer, /reset forgets the conversation, /exit or Ctrl-D leaves."
COMMAND = re.compile(r"/[a-z?]+")  # none we know by now; a path or a sentence goes to the model


@options.with_load_options
def chat(
    model: options.ModelArgument,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    n: Annotated[
        int | None, typer.Option("-n", "--max-tokens", min=1, help="Most tokens per answer.")
    ] = None,
    temperature: options.TemperatureOption = 0.7,
    top_k: options.TopKOption = 0,
    top_p: options.TopPOption = 0.95,
    min_p: options.MinPOption = 0.0,
    seed: options.SeedOption = None,
    *,
    load: options.LoadOptions,
    context: options.ContextOption = None,
    lora: options.LoraOption = None,
    speculate: options.SpeculateOption = "auto",
    speculate_rule: options.SpeculateRuleOption = options.SpeculateRule.match,
    draft: options.DraftOption = None,
    draft_vocab: options.DraftVocabOption = None,
) -> None:
    """Talk with MODEL. Figures of each answer go to stderr."""
    from martlet.runtime.sampling_params import SamplingParams
    from martlet.scripts.generate import (
        chat_template,
        check_draft,
        open_engine,
        open_model,
        system_message,
    )

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=n
    )
    arguments = load.arguments(context=context, lora=lora, speculate=speculate)
    guesses = speculate, draft, speculate_rule.value, draft_vocab
    check_draft(draft, speculate, draft_vocab)
    with open_model(model, **arguments) as opened, open_engine(opened, *guesses) as engine:
        chat_template(opened)  # a model without one is refused before anything is typed
        note(f"{model}, {opened.context} tokens of context. {HELP}")
        Conversation(opened, engine, params, system_message(system)).run()


class Conversation:
    """The messages so far; a failed turn leaves them as they were."""

    def __init__(
        self, model: Model, engine: Engine, params: SamplingParams, start: list[dict[str, str]]
    ) -> None:
        self.model, self.engine, self.params = model, engine, params
        self.start = start
        self.messages = list(start)

    def run(self) -> None:
        while (line := read_line()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self.start)
            elif COMMAND.fullmatch(line):
                note(HELP)
            elif line:
                self.turn(line)

    def turn(self, line: str) -> None:
        from martlet.runtime.errors import MartletError
        from martlet.scripts.generate import chat_ids, stream

        asked = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []

        def show(text: str) -> None:
            pieces.append(text)
            write_text(text)

        try:
            finish = stream(self.engine, chat_ids(self.model, asked), self.params, show)
        except MartletError as error:  # a conversation outlives one refused turn
            note(f"error: {error} (/reset starts over)")
            return
        write_text("\n")
        note(figures_line(figures(finish)))
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def read_line() -> str | None:
    """None at the end of input. An interrupt at the prompt drops the line, as shells do."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("")


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["chat", *sys.argv[1:]])
