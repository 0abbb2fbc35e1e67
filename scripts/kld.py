"""`martlet kld`: how far the predictions of quantized files are from a base's, on a text.
Owns the command and what it is told; running the models is in comparison.py, wording in
kld_report.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import chunk_progress, print_json

if TYPE_CHECKING:
    import numpy as np

N_CTX = 512  # where neither -c nor a file of base logits says otherwise


@options.with_load_options
def kld(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A model, or a file of base logits.")],
    tests: Annotated[
        list[str] | None, typer.Argument(metavar="TEST…", help="Models to compare with it.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="UTF-8 text; base logits hold their own."),
    ] = None,
    n_ctx: Annotated[
        int | None, typer.Option("-c", "--context", min=4, help=f"Tokens per chunk; {N_CTX}.")
    ] = None,
    n_chunks: options.ChunksOption = None,
    save_base: Annotated[
        Path | None, typer.Option(help="Write BASE's logits here, as llama-perplexity does.")
    ] = None,
    save_tokens: Annotated[
        Path | None, typer.Option(help="Write every token's scores here (.npy).")
    ] = None,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """KL divergence of each TEST from BASE, and the paired difference of the later ones to the
    first. BASE is computed with float activations; --activations f32 does so for TEST too, which
    leaves what the file lost."""
    from martlet.scripts import kld_report
    from martlet.scripts.base_logits import is_base_logits
    from martlet.scripts.comparison import Text, compare
    from martlet.scripts.scored_text import read_text

    if not tests and save_base is None:
        raise typer.BadParameter("name a TEST to compare with BASE, or --save-base to write it.")
    if not tests and save_tokens is not None:
        raise typer.BadParameter("--save-tokens takes a TEST: scores are of what is compared.")
    content = None if file is None else read_text(file)
    default = None if is_base_logits(base) else N_CTX
    text = Text(content, n_ctx or default, n_chunks)
    found = compare(base, tests or [], text, load, chunk_progress, save_base=save_base)
    if as_json:
        print_json({"file": file and str(file), **kld_report.as_json(found)})
    elif found.tests:
        kld_report.show(found)
    if save_tokens is not None:  # last: what was measured is told even if it cannot be written
        write_tokens(save_tokens, found.scores)


def write_tokens(path: Path, scores: list[np.ndarray]) -> None:
    """TOKEN_SCORES (n_tests, n_chunks, n_scored), under exactly this name."""
    import numpy as np
    from martlet.quant.whole_file import whole_or_nothing

    with whole_or_nothing(path) as out:
        np.save(out, np.stack(scores))


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["kld", *sys.argv[1:]])
