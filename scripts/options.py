"""The arguments and options that several commands share, written once.
Knows typer; knows nothing of what the values do."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class ExecutorName(str, Enum):
    auto = "auto"
    native = "native"
    numba = "numba"
    reference = "reference"


class ActivationsName(str, Enum):
    int8 = "int8"
    f32 = "f32"


class KvTypeName(str, Enum):
    f16 = "f16"
    f32 = "f32"
    q8_0 = "q8_0"


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
    ActivationsName, typer.Option(help="f32 rounds nothing before products, at a third the speed.")
]
KvTypeOption = Annotated[
    KvTypeName, typer.Option(help="What the cache holds; q8_0 halves its bytes, see the README.")
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
