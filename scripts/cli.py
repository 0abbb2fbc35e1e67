"""The command `martlet`: names its subcommands, each of which lives in a file of its own.
Knows no details of any; everything heavy is imported inside the commands, so that help is quick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from martlet.scripts.batch import batch
from martlet.scripts.bench import bench
from martlet.scripts.bench_compare import bench_compare
from martlet.scripts.bench_peers import bench_peers
from martlet.scripts.bench_record import bench_record
from martlet.scripts.bench_serve import bench_serve
from martlet.scripts.bench_speculate import bench_speculate
from martlet.scripts.bench_steps import bench_steps
from martlet.scripts.chat import chat
from martlet.scripts.console import OneLineErrors
from martlet.scripts.convert import convert
from martlet.scripts.deploy_ray import deploy
from martlet.scripts.divergence import divergence
from martlet.scripts.doctor import doctor
from martlet.scripts.doctor import version as installed_version
from martlet.scripts.estimate import estimate
from martlet.scripts.explain import explain
from martlet.scripts.imatrix import imatrix
from martlet.scripts.inspect_model import inspect
from martlet.scripts.kld import kld
from martlet.scripts.perplexity import perplexity
from martlet.scripts.pull import pull
from martlet.scripts.quality import quality
from martlet.scripts.quantize import quantize
from martlet.scripts.run import run
from martlet.scripts.serve import serve
from martlet.scripts.simulate import simulate
from martlet.scripts.soak import soak
from martlet.scripts.synthesize import synthesize
from martlet.scripts.top import top

COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "chat": chat,
    "serve": serve,
    "batch": batch,
    "top": top,
    "pull": pull,
    "inspect": inspect,
    "estimate": estimate,
    "explain": explain,
    "perplexity": perplexity,
    "kld": kld,
    "quality": quality,
    "divergence": divergence,
    "doctor": doctor,
    "convert": convert,
    "bench": bench,
    "bench-peers": bench_peers,
    "bench-serve": bench_serve,
    "bench-record": bench_record,
    "bench-compare": bench_compare,
    "bench-speculate": bench_speculate,
    "bench-steps": bench_steps,
    "simulate": simulate,
    "quantize": quantize,
    "imatrix": imatrix,
    "synthesize": synthesize,
    "soak": soak,
}

# Options of these may also come from the environment, as MARTLET_PORT for --port.
SETTINGS = {"serve": {"auto_envvar_prefix": "MARTLET"}}

app = typer.Typer(
    cls=OneLineErrors,
    name="martlet",
    help="Quantized language models on this machine's CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, command in COMMANDS.items():
    app.command(name, context_settings=SETTINGS.get(name))(command)
app.add_typer(deploy, name="deploy")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"martlet {installed_version()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(envvar="MARTLET_DEBUG", help="Show where an error came from.")
    ] = False,
) -> None:
    """Quantized language models on this machine's CPU."""


def main(arguments: Sequence[str] | None = None) -> None:
    app(args=arguments, prog_name="martlet")


if __name__ == "__main__":
    main()
