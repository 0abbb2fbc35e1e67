"""The arguments and options that several commands share, written once.
Knows typer, and the names load_model has for them; knows nothing of what the values do."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


class ExecutorName(str, Enum):
    auto = "auto"
    native = "native"
    numba = "numba"
    reference = "reference"


class ActivationsName(str, Enum):
    int8 = "int8"
    f32 = "f32"
    bf16 = "bf16"


class KvTypeName(str, Enum):
    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"


SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """`512M` or `1.5G`, in powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    n_bytes = int(float(match[1]) * SIZES[match[2]]) if match else 0
    if n_bytes < 1:
        raise typer.BadParameter(f"{text!r} is no size; write bytes or 512M, 1.5G")
    return n_bytes


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A known name (see `pull`), hf:ORG/REPO/FILE.gguf or a path."
    ),
]
ExecutorOption = Annotated[ExecutorName, typer.Option(help="Which implementation computes.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Default: what suits this machine, see `doctor`.")
]
ContextOption = Annotated[
    int | None,
    typer.Option("-c", "--context", min=1, help="Tokens one request may span, prompt included."),
]
ActivationsOption = Annotated[
    ActivationsName, typer.Option(help="What products take; f32 rounds nothing, bf16 little.")
]
KvTypeOption = Annotated[
    KvTypeName,
    typer.Option(help="What the cache holds; q8_0 halves its bytes, for a little accuracy."),
]
PrefixFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--prefix-cache-dir",
        file_okay=False,
        help="Keep computed prompts in this folder, for the next start. Default: nowhere.",
    ),
]
PrefixBytesOption = Annotated[
    int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Bound of that folder.")
]
KvBytesOption = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        help="Memory for keys and values, as 2G. Default: 8 contexts, at most 1/4 of what is free.",
    ),
]
SpeculateOption = Annotated[
    str,
    typer.Option(
        metavar="auto|off|N",
        help="Guess what repeats and check several tokens at once: as many as pay, none, or N. "
        "The text stays the same.",
    ),
]


class SpeculateRule(str, Enum):
    match = "match"
    reject = "reject"


SpeculateRuleOption = Annotated[
    SpeculateRule,
    typer.Option(
        help="When a guessed token stands: where it is the one drawn, or by a chance that leaves "
        "the distribution as it is. Requests may say otherwise.",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A smaller model of the same vocabulary that guesses."),
]
DraftVocabOption = Annotated[
    str | None,
    typer.Option(
        metavar="N[:FILE]",
        help="Guess the N most frequent tokens of a text alone, without one those of the lowest "
        "numbers: for a smaller output matrix of --draft, or of the model's own block.",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]FILE",
        help="Adapter (LoRA, GGUF); may be repeated. With a NAME for requests to that name alone.",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        dir_okay=False,
        help="Write down what time goes into, for ui.perfetto.dev: steps, ops, requests.",
    ),
]
TextOption = Annotated[Path, typer.Option("-f", "--file", help="UTF-8 text.")]
ChunkTokensOption = Annotated[int, typer.Option("-c", "--context", min=4, help="Tokens per chunk.")]
ChunksOption = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Only the first N chunks.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
TemperatureOption = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0: all.")]
TopPOption = Annotated[float, typer.Option(help="Keep the likeliest tokens of total mass p.")]
MinPOption = Annotated[float, typer.Option(help="Drop tokens below this share of the best.")]
SeedOption = Annotated[
    int | None, typer.Option(help="The same seed gives the same text; one is chosen and shown.")
]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End at this text, not shown; may be repeated.")
]


MmapExpertsOption = Annotated[
    bool,
    typer.Option(
        "--mmap-experts",
        help="Leave experts in the file until a token first chooses them. The text stays the same.",
    ),
]


RepackOption = Annotated[
    bool | None,
    typer.Option(
        "--repack/--no-repack",
        help="Hold a packed copy of the weights, or read them from the file: slower, in less "
        "memory. The text stays the same. Default: the copy, if it fits.",
    ),
]


ShareWeightsOption = Annotated[
    bool,
    typer.Option(
        "--share-weights",
        help="Hold the packed weights in one copy for all processes of this machine that say so.",
    ),
]


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded, as every command that computes asks for it."""

    executor: ExecutorOption = ExecutorName.auto
    threads: ThreadsOption = None
    kv_type: KvTypeOption = KvTypeName.f16
    activations: ActivationsOption = ActivationsName.int8
    mmap_experts: MmapExpertsOption = False
    repack: RepackOption = None
    share_weights: ShareWeightsOption = False

    def over_contexts(self, n_ctx: int) -> dict[str, Any]:
        """For those who lay out steps themselves, over whole contexts of n_ctx tokens."""
        return self.arguments(context=n_ctx, gives_back=False)

    def arguments(self, **others: Any) -> dict[str, Any]:
        """For scripts.generate.open_model."""
        return {
            "executor": self.executor.value,
            "threads": self.threads,
            "kv_type": self.kv_type.value,
            "activations": self.activations.value,
            "mmap_experts": self.mmap_experts,
            "repack": self.repack,
            "share_weights": self.share_weights,
            **others,
        }


def with_load_options(command: Callable[..., None]) -> Callable[..., None]:
    """Puts the options of LoadOptions in the place of the command's parameter `load`."""
    names = [field.name for field in fields(LoadOptions)]

    @functools.wraps(command)
    def bundled(**given: Any) -> None:
        load = LoadOptions(**{name: given.pop(name) for name in names})
        command(load=load, **given)

    shown = list(_parameters(command))
    at = [parameter.name for parameter in shown].index("load")
    shown[at : at + 1] = _parameters(LoadOptions)
    # Typer reads these two to know what the command line takes.
    bundled.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    bundled.__annotations__ = {each.name: each.annotation for each in shown}
    return bundled


def _parameters(command: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        yield parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]
        )
