"""Model files that are cut short or written to while they are mapped: the step that read them fails
in words, the process lives, and whoever does not read the file any more notices nothing."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from martlet.quant.file_map import FileMap
from martlet.runtime.engine import Engine
from martlet.runtime.errors import FileChanged
from martlet.runtime.events import Event, FinishEvent
from martlet.runtime.model import Model, load_model
from martlet.runtime.sampling_params import SamplingParams

from ..recorded import gguf_of
from ..server.serving import wait_until
from .native_library import ISAS

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="no native library"),
    pytest.mark.skipif(sys.platform == "win32", reason="mapped files cannot be changed there"),
]
PAGE = mmap.PAGESIZE
READS_FILE: dict[str, tuple[str, dict[str, Any]]] = {
    "no-repack": ("qwen3moe", {"repack": False}),
    "mmap-experts": ("qwen3moe", {"mmap_experts": True}),
    "table": ("gemma4-shared", {}),  # of embeddings of each layer
}
PACKED = "qwen3moe"


def cut(path: Path) -> None:
    os.truncate(path, PAGE)


def write_in_place(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-PAGE, os.SEEK_END)
        file.write(bytes(PAGE))


def copy_over(path: Path) -> None:
    """As `cp` does: the file is emptied and written anew."""
    path.write_bytes(path.read_bytes()[::-1])


def remove(path: Path) -> None:
    path.unlink()


def rename_over(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(PAGE))
    os.replace(other, path)


CHANGES = [cut, write_in_place, copy_over, remove, rename_over]


def copied(model: str, folder: Path) -> Path:
    return Path(shutil.copy(gguf_of(model), folder / "model.gguf"))


def opened(path: Path, **how: Any) -> Model:
    return load_model(path, executor="native", context=64, kv_bytes=1 << 20, threads=2, **how)


@contextmanager
def engine_of(path: Path, **how: Any) -> Iterator[Engine]:
    with (
        closing(opened(path, **how)) as model,
        closing(Engine(model.executor, model.tokenizer, context=model.context)) as engine,
    ):
        engine.start()
        yield engine


def ask(engine: Engine, prompt: list[int]) -> FinishEvent:
    found, done = [], threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, FinishEvent):
            found.append(event)
            done.set()

    engine.submit(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), on_event)
    assert done.wait(60)
    return found[0]


@pytest.mark.parametrize("change", [cut, write_in_place, copy_over])
@pytest.mark.parametrize("how", READS_FILE)
def test_the_request_fails_in_words_and_the_engine_ends(
    tmp_path: Path, how: str, change: Callable[[Path], None]
) -> None:
    name, options = READS_FILE[how]
    path = copied(name, tmp_path)
    whole = path.read_bytes()
    with engine_of(path, **options) as engine:
        assert ask(engine, [1, 2, 3]).reason == "length"
        change(path)
        end = ask(engine, [9, 8, 7])
        assert (end.reason, end.n_output) == ("error", 0)
        assert "model.gguf was changed or cut short" in (end.error or "")
        wait_until(lambda: not engine.is_alive)
    path.write_bytes(whole)
    with engine_of(path, **options) as engine:
        assert ask(engine, [1, 2, 3]).reason == "length"


@pytest.mark.parametrize("change", [remove, rename_over])
@pytest.mark.parametrize("how", READS_FILE)
def test_another_file_under_the_name_changes_nothing(
    tmp_path: Path, how: str, change: Callable[[Path], None]
) -> None:
    name, options = READS_FILE[how]
    path = copied(name, tmp_path)
    with engine_of(path, **options) as engine:
        change(path)
        assert ask(engine, [1, 2, 3]).reason == "length"


@pytest.mark.parametrize("change", CHANGES)
def test_packed_weights_need_no_file(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = copied(PACKED, tmp_path)
    with engine_of(path) as engine:
        change(path)
        assert ask(engine, [1, 2, 3]).reason == "length"


@pytest.mark.parametrize("how", READS_FILE)
def test_a_file_that_is_cut_while_it_is_loaded_is_refused(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from martlet.runtime.executors import native

    name, options = READS_FILE[how]
    path = copied(name, tmp_path)
    tensor_bytes, n_bytes = native._tensor_bytes, path.stat().st_size

    def cut_first(*arguments: Any) -> Any:
        os.truncate(path, n_bytes // 2)
        return tensor_bytes(*arguments)

    monkeypatch.setattr(native, "_tensor_bytes", cut_first)
    with pytest.raises(FileChanged):
        opened(path, **options)


def test_what_is_cut_reads_as_zeros_up_to_its_end(tmp_path: Path) -> None:
    """The watch itself, of two readers of one map, and of a page in the middle."""
    from martlet.runtime.executors.file_maps import FileMaps
    from martlet.runtime.executors.native_library import Library

    library = Library()
    path = tmp_path / "data"
    path.write_bytes(b"\x01" * (5 * PAGE + 7))
    values = np.frombuffer(FileMap.open(path), np.uint8)
    first, second = (FileMaps(library.ffi, library.lib) for _ in range(2))
    first.watch(values, stays=True)
    second.watch(values[PAGE:], stays=True)
    first.check()
    os.truncate(path, 2 * PAGE)
    assert int(values.sum()) == 2 * PAGE
    for maps in (first, second):
        with pytest.raises(FileChanged):
            maps.check()
        maps.close()
        maps.check()  # none is left


ELSEWHERE = """
import ctypes, mmap, os, sys
import numpy as np
from pathlib import Path
from martlet.quant.file_map import FileMap
from martlet.runtime.executors.file_maps import FileMaps
from martlet.runtime.executors.native_library import Library
path = Path(sys.argv[1])
library = Library()
maps = []
for name in "watched", "other":
    (path / name).write_bytes(b"x" * 3 * mmap.PAGESIZE)
    maps.append(np.frombuffer(FileMap.open(path / name), np.uint8))
FileMaps(library.ffi, library.lib).watch(maps[0])
watch = FileMaps(library.ffi, library.lib)
watch.watch(maps[0])
os.truncate(path / "other", 1)
print(maps[1].sum())
"""


def test_other_maps_are_left_to_the_system(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == b""
