"""`martlet divergence`: what the executor's arithmetic costs, against the same file in fp32.
Owns the command only: it is `martlet kld MODEL MODEL`, whose base takes float activations and every
weight as its format defines it."""

from __future__ import annotations

import sys

from martlet.scripts import options
from martlet.scripts.console import chunk_progress, print_json


@options.with_load_options
def divergence(
    model: options.ModelArgument,
    file: options.TextOption,
    n_ctx: options.ChunkTokensOption = 512,
    n_chunks: options.ChunksOption = None,
    *,
    load: options.LoadOptions,
    as_json: options.JsonOption = False,
) -> None:
    """KL divergence of MODEL as computed here from the same file computed in fp32."""
    from martlet.scripts import kld_report
    from martlet.scripts.comparison import Text, compare
    from martlet.scripts.scored_text import read_text

    text = Text(read_text(file), n_ctx, n_chunks)
    found = compare(model, [model], text, load, chunk_progress)
    if as_json:
        print_json({"file": str(file), **kld_report.as_json(found)})
    else:
        kld_report.show(found)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["divergence", *sys.argv[1:]])
