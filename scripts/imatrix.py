"""`martlet imatrix`: the importance of every input channel on a text, as llama.cpp's files hold it.
Owns the command; what is summed is runtime/calibration.py's, the file is quant/imatrix.py's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from martlet.scripts import options
from martlet.scripts.console import byte_progress, chunk_progress, note


def imatrix(
    model: options.ModelArgument,
    file: Annotated[
        Path, typer.Option("-f", "--file", exists=True, dir_okay=False, help="UTF-8 text.")
    ],
    out: Annotated[Path, typer.Option("-o", "--output", help="Where to write it.")],
    n_ctx: Annotated[int, typer.Option("-c", "--context", min=4, help="Tokens per chunk.")] = 512,
    n_chunks: options.ChunksOption = None,
    process_output: Annotated[
        bool, typer.Option(help="The output projection too, which llama-imatrix leaves out.")
    ] = False,
    executor: options.ExecutorOption = options.ExecutorName.auto,
    threads: options.ThreadsOption = None,
) -> None:
    """Write the mean square of what every weight of MODEL multiplies, with float activations."""
    import numpy as np
    from martlet.quant.gguf_file import GGUFFile
    from martlet.quant.imatrix import write_imatrix
    from martlet.runtime.calibration import Calibrator
    from martlet.runtime.config import ModelConfig
    from martlet.runtime.tokenizer import Tokenizer
    from martlet.runtime.weights import StoredWeights
    from martlet.scripts.models import find_model
    from martlet.scripts.scored_text import chunks_of, read_text

    with byte_progress() as progress:
        path = find_model(model, progress=progress)
    with GGUFFile.open(path) as opened:
        shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
        config = ModelConfig.from_metadata(opened.metadata, shapes)
        tokenizer = Tokenizer.from_metadata(opened.metadata)
        chunks = chunks_of(read_text(file), tokenizer, n_ctx, n_chunks)
        weights = StoredWeights(opened.tensors)
        runner = Calibrator(
            config, weights, context=n_ctx, executor=executor.value, threads=threads
        )
        moments, stacks = runner.empty(), runner.empty_stacks()
        with chunk_progress("imatrix", len(chunks)) as on_chunk:
            for i, tokens in enumerate(chunks):
                runner.add(tokens, moments, stacks)
                on_chunk(i + 1, "")
        runner.close()
    squares = {n: (m.squares[None], np.array([m.n_rows])) for m in moments for n in m.weights}
    squares |= {n: (m.squares, m.n_rows) for m in stacks for n in m.weights}
    found = {n: each for n, each in squares.items() if process_output or n.startswith("blk.")}
    write_imatrix(
        out,
        {name: sums.astype(np.float32) for name, (sums, _) in found.items()},
        {name: counts[:, None].astype(np.float32) for name, (_, counts) in found.items()},
        dataset=file.name,
        n_chunks=len(chunks),
        chunk_tokens=n_ctx,
    )
    note(f"{out}: {len(found)} tensors, {len(chunks)} chunks of {n_ctx} tokens")


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["imatrix", *sys.argv[1:]])
