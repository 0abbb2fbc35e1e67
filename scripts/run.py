"""`martlet run`: one prompt, the answer streamed to stdout, its latency figures to stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import EXIT_INTERRUPTED, note, print_json, write_text
from martlet.scripts.figures import MEANINGS, figures, figures_line


@options.with_load_options
def run(
    model: options.ModelArgument,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text; `-` reads stdin.")],
    n: Annotated[int, typer.Option("-n", "--max-tokens", min=1, help="Most new tokens.")] = 128,
    temperature: options.TemperatureOption = 0.0,
    top_k: options.TopKOption = 0,
    top_p: options.TopPOption = 1.0,
    min_p: options.MinPOption = 0.0,
    seed: options.SeedOption = None,
    stop: options.StopOption = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Chat template, or the bare text.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    *,
    load: options.LoadOptions,
    context: options.ContextOption = None,
    lora: options.LoraOption = None,
    speculate: options.SpeculateOption = "off",
    speculate_rule: options.SpeculateRuleOption = options.SpeculateRule.match,
    draft: options.DraftOption = None,
    draft_vocab: options.DraftVocabOption = None,
    trace: options.TraceOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Complete PROMPT; the figures line on stderr says how long it took."""
    from martlet.runtime.sampling_params import SamplingParams
    from martlet.scripts.generate import check_draft, open_engine, open_model, prompt_ids, stream
    from martlet.scripts.tracing import open_trace

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=n,
        stop=tuple(stop or ()),
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    arguments = load.arguments(context=context, lora=lora, speculate=speculate)
    pieces: list[str] = []
    guesses = speculate, draft, speculate_rule.value, draft_vocab
    check_draft(draft, speculate, draft_vocab)
    with (
        open_trace(trace) as written,
        open_model(model, trace=written, **arguments) as opened,
        open_engine(opened, *guesses) as engine,
    ):
        ids = prompt_ids(opened, text, chat=chat, system=system)
        finish = stream(engine, ids, params, pieces.append if as_json else write_text)
        values = {**figures(finish), "executor": opened.executor.name}
    if as_json:
        print_json({"text": "".join(pieces), **values, "definitions": MEANINGS})
    else:
        write_text("\n")
        note(f"{figures_line(values)} · {values['executor']}")
    if finish.reason == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["run", *sys.argv[1:]])
