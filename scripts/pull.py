"""`martlet pull`: fetches a model into the cache, checked, and says where it is."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from martlet.scripts import options
from martlet.scripts.catalogue import CATALOGUE
from martlet.scripts.console import byte_progress, note, print_json
from martlet.scripts.models import cache_folder, cached_path, find_model, is_cached


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Leave out to list the known names.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Fetch a model by known name or hf:ORG/REPO/FILE.gguf; check one that is already here."""
    if name is None:
        list_names(as_json)
        return
    if name in CATALOGUE:
        note(f"{CATALOGUE[name].title}; licence: {CATALOGUE[name].licence}")
    with byte_progress() as progress:
        path = find_model(name, progress=progress, verify=True)
    print_json({"name": name, "path": str(path)}) if as_json else print(path)


def list_names(as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    cache = cache_folder()
    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "title": model.title,
            "bytes": model.n_bytes,
            "licence": model.licence,
            "path": str(cached_path(model, cache)) if is_cached(model, cache) else None,
        }
        for model in CATALOGUE.values()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "what", "MiB", "licence", "here", box=None, pad_edge=False)
    for row in rows:
        mib = f"{row['bytes'] / 2**20:.0f}"
        here = "yes" if row["path"] else "no"
        table.add_row(row["name"], row["title"], mib, row["licence"], here)
    Console().print(table)
    note(f"cache: {cache / 'models'}")


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["pull", *sys.argv[1:]])
