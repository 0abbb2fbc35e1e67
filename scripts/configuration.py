"""One TOML file for a command's options: its keys are the options' long names.
Owns reading and checking it. What the command line or the environment says goes before it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_configuration(ctx: typer.Context, path: Path | None) -> Path | None:
    """Gives the command its defaults. Raises BadParameter for a key that is no option."""
    if path is not None:
        parameters = {each.name: each for each in ctx.command.params if each.name != "config"}
        lists = {name: is_list(each) for name, each in parameters.items()}
        ctx.default_map = defaults(path, lists)
    return path


def is_list(parameter: Any) -> bool:
    return bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1


def defaults(path: Path, options: Mapping[str, bool]) -> dict[str, Any]:
    """options: names, and whether each may be given several times."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    found = {known(key, options, path): plain(value, key, path) for key, value in given.items()}
    return {
        name: [value] if options[name] and not isinstance(value, list) else value
        for name, value in found.items()
    }


def known(key: str, options: Mapping[str, bool], path: Path) -> str:
    name = key.replace("-", "_")
    if name in options:
        return name
    close = difflib.get_close_matches(name, options, 1)
    hint = f"; do you mean {close[0].replace('_', '-')}?" if close else ""
    raise typer.BadParameter(f"{path}: {key!r} is no option of this command{hint}")


def plain(value: Any, key: str, path: Path) -> Any:
    """As the command line would bring it: words, lists of words, or a switch."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [str(each) for each in value]
    if isinstance(value, Mapping):
        raise typer.BadParameter(f"{path}: {key!r} is a table; options stand at the top level")
    return str(value)


ConfigurationOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=read_configuration,
        metavar="FILE",
        help="TOML file of these options (port = 8080). Flags and environment go before it.",
    ),
]
