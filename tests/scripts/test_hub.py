"""hf: addresses, with huggingface-hub's functions replaced: no network."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from martlet.quant.errors import NoSpace
from martlet.scripts import hub, models
from martlet.scripts.errors import PullError


class FakeHub:
    """A repository with sized files; remembers what was asked."""

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self.folder, self.sizes, self.fetched = folder, sizes, list[str]()

    def download(self, repo: str, name: str, local_files_only: bool = False) -> str:
        path = self.folder / name
        if local_files_only and not path.exists():
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only:
            self.fetched.append(name)
            path.write_bytes(b"GGUF")
        return str(path)

    def metadata(self, url: str) -> SimpleNamespace:
        name = url.rsplit("/", 1)[1]
        if name not in self.sizes:
            raise OSError("404: nothing here\nand a second line")
        return SimpleNamespace(size=self.sizes[name])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path, {"m.gguf": 4, "huge.gguf": 1 << 60})
    fake.sizes |= {f"s-0000{i}-of-00002.gguf": 4 for i in (1, 2)}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fake.metadata)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return fake


def find(spec: str) -> Path:
    return models.find_model(spec, progress=lambda *_: None)


def test_a_file_is_fetched_once(fake: FakeHub) -> None:
    assert find("hf:me/repo/m.gguf").name == "m.gguf"
    assert find("hf:me/repo/m.gguf").name == "m.gguf"
    assert fake.fetched == ["m.gguf"]


def test_naming_any_shard_brings_the_whole_set(fake: FakeHub) -> None:
    assert find("hf:me/repo/s-00002-of-00002.gguf").name == "s-00001-of-00002.gguf"
    assert fake.fetched == ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"]


def test_a_file_in_a_folder_of_the_repository() -> None:
    assert hub.parse_address("hf:me/repo/q4/m.gguf") == ("me/repo", ["q4/m.gguf"])


@pytest.mark.parametrize(
    "spec",
    [
        "hf:",
        "hf:me/m.gguf",
        "hf:me/repo/m.bin",
        "hf:me/repo/a b.gguf",
        "hf:me/repo/../m.gguf",
        "hf:../repo/m.gguf",
        "hf:me/repo//m.gguf",
    ],
)
def test_a_malformed_address_is_refused(spec: str) -> None:
    with pytest.raises(PullError, match="hf:ORG/REPO/FILE"):
        find(spec)


@pytest.mark.usefixtures("fake")
def test_the_library_s_error_becomes_one_line() -> None:
    with pytest.raises(PullError, match="404: nothing here; check") as error:
        find("hf:me/repo/absent.gguf")
    assert "\n" not in str(error.value)


def test_space_is_checked_before_the_download(fake: FakeHub) -> None:
    with pytest.raises(NoSpace):
        find("hf:me/repo/huge.gguf")
    assert fake.fetched == []
