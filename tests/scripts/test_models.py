"""Names, paths and downloads: what ends up in the cache, and what must not.
pip is the real one, pointed at a folder of wheels that the test makes; the network is not used."""

import hashlib
import os
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from martlet.quant import whole_file
from martlet.quant.errors import NoSpace
from martlet.scripts import models
from martlet.scripts.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueModel, Piece
from martlet.scripts.errors import ChecksumMismatch, PullError, UnknownModel

HALVES = (b"GGUF first half ", b"and the second half")
WHOLE = b"".join(HALVES)
DiskUsage = namedtuple("DiskUsage", "total used free")


def silent(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def model() -> CatalogueModel:
    pieces = (Piece("half-one==1.0", "one/a.part"), Piece("half-two==1.0", "two/b.part"))
    return CatalogueModel(
        "tiny", "Tiny", "none", pieces, len(WHOLE), hashlib.sha256(WHOLE).hexdigest()
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "half-one", "one/a.part", HALVES[0])
    write_wheel(folder, "half-two", "two/b.part", HALVES[1])
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def pull(tmp_path: Path, model: CatalogueModel) -> Callable[..., Path]:
    def run(spec: str = "tiny", **options: bool) -> Path:
        return models.find_model(
            spec, progress=silent, cache=tmp_path / "cache", catalogue={"tiny": model}, **options
        )

    return run


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


@pytest.mark.usefixtures("wheels")
def test_pieces_are_joined_in_order_and_nothing_else_stays(
    pull: Callable[..., Path], tmp_path: Path
) -> None:
    path = pull()
    assert path.read_bytes() == WHOLE
    assert [p.name for p in path.parent.iterdir()] == ["tiny.gguf"]


def test_a_cached_model_needs_no_pip(
    wheels: Path, pull: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pull()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert pull() == first


def test_verify_replaces_a_cached_file_whose_bytes_changed(
    wheels: Path, pull: Callable[..., Path]
) -> None:
    path = pull()
    path.write_bytes(WHOLE[::-1])
    assert pull().read_bytes() == WHOLE[::-1]  # same size: not read again
    assert pull(verify=True).read_bytes() == WHOLE


def test_a_cut_off_cached_file_is_fetched_again(wheels: Path, pull: Callable[..., Path]) -> None:
    pull().write_bytes(WHOLE[:5])
    assert pull().read_bytes() == WHOLE


@pytest.mark.parametrize("second", [b"not the second half", b"short", b""])
def test_a_wrong_hash_leaves_nothing_behind(
    wheels: Path, pull: Callable[..., Path], tmp_path: Path, second: bytes
) -> None:
    write_wheel(wheels, "half-two", "two/b.part", second)
    with pytest.raises(ChecksumMismatch, match="pip config list"):
        pull()
    assert cached(tmp_path) == []


def test_a_failed_verify_keeps_the_old_file(wheels: Path, pull: Callable[..., Path]) -> None:
    path = pull()
    path.write_bytes(WHOLE[::-1])
    write_wheel(wheels, "half-two", "two/b.part", b"something else")
    with pytest.raises(ChecksumMismatch):
        pull(verify=True)
    assert path.read_bytes() == WHOLE[::-1]


def test_a_wheel_pip_cannot_find_is_named(
    wheels: Path, pull: Callable[..., Path], tmp_path: Path
) -> None:
    next(wheels.glob("half_two*")).unlink()
    with pytest.raises(PullError, match=r"half-two==1\.0.*pip config list") as error:
        pull()
    assert "\n" not in str(error.value)
    assert cached(tmp_path) == []


def test_a_wheel_without_the_member_is_named(
    wheels: Path, pull: Callable[..., Path], tmp_path: Path
) -> None:
    write_wheel(wheels, "half-two", "two/renamed.part", HALVES[1])
    with pytest.raises(PullError, match=r"half_two.*does not hold two/b\.part"):
        pull()
    assert cached(tmp_path) == []


def test_a_full_disk_is_noticed_before_the_download(
    pull: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pip(*_: object) -> Path:
        raise AssertionError("pip was started")

    monkeypatch.setattr(models, "pip_download", no_pip)
    monkeypatch.setattr(whole_file.shutil, "disk_usage", lambda _: DiskUsage(1 << 30, 0, 3 << 20))
    with pytest.raises(NoSpace, match=r"3 MiB free.*needs 64 MiB.*MARTLET_CACHE"):
        pull()
    assert cached(tmp_path) == []


def test_a_path_is_taken_as_it_is(pull: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"x")
    assert pull(str(path)) == path


@pytest.mark.parametrize(
    ("spec", "told"),
    [("tny", "did you mean tiny"), ("zzzzzz", "known names: tiny"), (".", "is a folder")],
)
def test_an_unknown_name_is_answered_with_the_next_step(
    pull: Callable[..., Path], spec: str, told: str
) -> None:
    with pytest.raises(UnknownModel, match=told):
        pull(spec)


@pytest.mark.parametrize(
    ("platform", "environ", "folder"),
    [
        ("linux", {}, "home/.cache/martlet"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/martlet"),
        ("darwin", {"XDG_CACHE_HOME": "xdg"}, "home/Library/Caches/martlet"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/martlet"),
        ("win32", {}, "home/AppData/Local/martlet"),
        ("win32", {"MARTLET_CACHE": "mine"}, "mine"),
    ],
)
def test_the_cache_is_where_each_system_keeps_caches(
    platform: str, environ: dict[str, str], folder: str
) -> None:
    assert models.cache_folder(environ, platform, Path("home")) == Path(folder)


def test_the_catalogue_is_consistent() -> None:
    assert DEFAULT_MODEL in CATALOGUE
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert len(entry.sha256) == 64
        assert all("==" in piece.requirement for piece in entry.pieces)
    parts = CATALOGUE["gemma3-270m"].pieces
    assert [part.member[-2:] for part in parts] == ["00", "01", "02", "03"]
    assert [part.requirement[-8:] for part in parts] == [f"{i}==1.0.0"[-8:] for i in (1, 2, 3, 4)]
