"""`martlet convert`: a checkpoint folder of Hugging Face form to a GGUF file.
Owns the command: the choice of formats, progress, the report. Reading, checking and writing are in
quant/convert*.py, the comparison with the source in convert_check.py."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from martlet.scripts import options
from martlet.scripts.console import byte_progress, note, print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from martlet.quant.convert import Conversion
    from martlet.quant.gguf_write import OutTensor
    from martlet.quant.mixtures import Preset
    from martlet.scripts.convert_check import LogitsCheck

AS_STORED = "auto"
ADAPTER_TYPES = ("F32", "F16", "BF16")


def convert(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_DIR", help="With config.json and safetensors.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf")],
    type_: Annotated[
        str,
        typer.Option("--type", help="F32, F16, BF16, Q8_0, Q4_K_M, …; auto: as stored."),
    ] = AS_STORED,
    name: Annotated[str | None, typer.Option(help="Default: the folder's name.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the file's logits with the checkpoint's.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="CHECKPOINT_DIR is a LoRA adapter of the model there, whose config.json is read.",
        ),
    ] = None,
    nextn: Annotated[
        bool,
        typer.Option(
            "--nextn/--no-nextn", help="Write the block that guesses further tokens, if any."
        ),
    ] = True,
    threads: options.ThreadsOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write the model or adapter in CHECKPOINT_DIR as OUT.gguf, for martlet and llama.cpp."""
    if base is not None or is_adapter(checkpoint):
        if check:
            raise typer.BadParameter("--check compares whole models; leave it out for an adapter")
        convert_adapter(checkpoint, out, base, type_, name, as_json=as_json)
        return
    from martlet.quant.convert import read_conversion
    from martlet.quant.errors import UnsupportedError
    from martlet.quant.mixtures import find_preset
    from martlet.scripts.convert_check import check_token_ids
    from martlet.scripts.convert_facts import reader_facts

    conversion = read_conversion(checkpoint, reader_facts(), nextn=nextn)
    if check and not conversion.settings.family.is_causal:
        raise UnsupportedError(
            f"--check compares logits, and {conversion.settings.family.arch} has none; leave it out"
        )
    check_token_ids(conversion.checkpoint, conversion.tokenizer)
    preset = find_preset(conversion.stored_type if type_ == AS_STORED else type_)
    formats = choose_formats(conversion, preset)
    for text in conversion.notes:
        note(f"note: {text}")
    name = name or checkpoint.resolve().name
    results: list[LogitsCheck] = []

    def compare(whole: Path) -> None:
        results.append(checked(conversion, whole, preset.name))

    n_bytes = write_file(
        conversion, out, formats, preset.file_type, name, threads, compare if check else None
    )
    result = results[0] if check else None
    report(conversion, out, preset.name, formats, n_bytes, result, as_json=as_json)


def is_adapter(folder: Path) -> bool:
    from martlet.quant.convert_adapter import CONFIG

    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def convert_adapter(
    folder: Path, out: Path, base: Path | None, type_: str, name: str | None, *, as_json: bool
) -> None:
    from martlet.quant.convert_adapter import read_adapter, write_adapter

    if base is None:
        raise typer.BadParameter(f"{folder} is an adapter: name its model's folder with --base")
    conversion = read_adapter(folder, base)
    format_name = conversion.stored_type if type_ == AS_STORED else type_
    if format_name not in ADAPTER_TYPES:
        raise typer.BadParameter(f"--type {type_}: adapters are {', '.join(ADAPTER_TYPES)}")
    n_bytes = write_adapter(
        conversion, out, format_name=format_name, name=name or folder.resolve().name
    )
    arch, n_adapted = conversion.settings.family.arch, len(conversion.weights) // 2
    if as_json:
        about = {"file": str(out), "architecture": arch, "type": format_name, "n_bytes": n_bytes}
        print_json({**about, "n_adapted": n_adapted, "alpha": conversion.alpha})
        return
    print(
        f"{out}: adapter of {n_adapted} weights of {arch} in {format_name}, {n_bytes / 1e6:,.1f} MB"
    )


def choose_formats(conversion: Conversion, preset: Preset) -> dict[str, str]:
    """The format of each tensor by name; what the preset leaves alone is F32. Blocks of the
    checkpoint stay what they are where its own type is kept."""
    from martlet.quant.mixtures import mixture

    shapes = {w.name: w.shape for w in conversion.weights}
    chosen = mixture(preset, conversion.metadata("", preset.file_type), shapes)
    kept = conversion.in_blocks if preset.name == conversion.stored_type else {}
    return {**dict.fromkeys(shapes, "F32"), **chosen, **kept}


def write_file(
    conversion: Conversion,
    out: Path,
    formats: Mapping[str, str],
    file_type: int,
    name: str,
    threads: int | None,
    check: Callable[[Path], None] | None = None,
) -> int:
    from martlet.quant.convert import write_conversion
    from martlet.quant.formats import FORMATS

    total_bytes = sum(FORMATS[formats[w.name]].data_bytes(w.shape) for w in conversion.weights)
    done_bytes = 0
    with byte_progress() as progress:

        def on_tensor(tensor: OutTensor) -> None:
            nonlocal done_bytes
            done_bytes += tensor.n_bytes
            progress(f"{tensor.name} {tensor.format.name}", done_bytes, total_bytes)

        return write_conversion(
            conversion,
            out,
            formats=formats,
            file_type=file_type,
            name=name,
            threads=threads,
            on_tensor=on_tensor,
            check=check,
        )


def checked(conversion: Conversion, whole: Path, type_: str) -> LogitsCheck:
    """A file that keeps every bit of the weights must compute the same; another one is refused."""
    from martlet.quant.errors import MartletError
    from martlet.scripts.convert_check import EXACT_ERROR, compare_logits

    result = compare_logits(conversion, whole)
    if type_ in ("F32", conversion.stored_type) and not result.is_exact:
        raise MartletError(
            f"{conversion.checkpoint.folder}: logits of the new file differ from the checkpoint's "
            f"by {result.max_error:.2g} of the largest, more than {EXACT_ERROR:g}; nothing was "
            "written: please report this checkpoint"
        )
    return result


def report(
    conversion: Conversion,
    out: Path,
    type_: str,
    formats: Mapping[str, str],
    n_bytes: int,
    result: LogitsCheck | None,
    *,
    as_json: bool,
) -> None:
    from collections import Counter
    from math import prod

    counts = Counter(formats.values())
    n_weights = sum(prod(w.shape) for w in conversion.weights)
    if as_json:
        about: dict[str, Any] = {
            "file": str(out),
            "architecture": conversion.settings.family.arch,
            "type": type_,
            "n_bytes": n_bytes,
            "n_tensors": dict(counts),
            "n_weights": n_weights,
            "notes": conversion.notes,
        }
        print_json({**about, "check": asdict(result) if result else None})
        return
    told = ", ".join(f"{n} in {name}" for name, n in counts.most_common())
    print(
        f"{out}: {conversion.settings.family.arch} as {type_}, tensors: {told}; "
        f"{n_bytes / 1e6:,.1f} MB, {8 * n_bytes / n_weights:.2f} bits per weight"
    )
    if result:
        print(
            f"logits of {result.n_tokens} tokens against the checkpoint's: largest difference "
            f"{result.max_error:.2g} of the largest, RMS {result.rms_error:.2g} of their spread, "
            f"mean KL {result.mean_kl:.2g}, same top token {result.same_top:.1%}"
        )


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["convert", *sys.argv[1:]])
