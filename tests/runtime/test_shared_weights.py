"""One packed copy for several processes: the same bits, whoever packs, leaves or is killed."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from martlet.runtime import estimate as formulas
from martlet.runtime import fingerprint, shared_weights
from martlet.runtime.errors import FileFormatError, NotEnoughMemory, UnsupportedError
from martlet.runtime.executors.native import NativeExecutor
from martlet.runtime.model import load_model
from martlet.runtime.models import record_plan
from martlet.runtime.shared_weights import SharedWeights
from martlet.runtime.weights import StoredTensor, StoredWeights

from ..recorded import gguf_of
from .native_library import IS_SANITIZED  # skips the file where there is no native library
from .tiny import BLOCK_FORMATS, FLOAT_FORMATS, TinyModel, run_tokens, tiny_model

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory of Linux"),
    pytest.mark.skipif(bool(os.environ.get("MARTLET_GUARD")), reason="weights lie apart there"),
]
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 300, 33)]
SIZE = 3 * 4096

IN_ANOTHER_PROCESS = """
import sys, time
from pathlib import Path
from martlet.runtime.shared_weights import SharedWeights
shared = SharedWeights(sys.argv[2], int(sys.argv[3]), Path(sys.argv[1]))
memory, is_packed = shared.open()
if not is_packed:
    memory[: len(memory) // 2] = 7
    if sys.argv[4] == "whole":
        memory[:] = 7
        shared.publish()
print("open", flush=True)
time.sleep(60)
"""


def killed_while_open(folder: Path, key: str, how: str) -> None:
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(folder), key, str(SIZE), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.send_signal(signal.SIGKILL)


def files(folder: Path) -> set[str]:
    """All but what is empty."""
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != "gate"}


def executor_of(model: TinyModel, folder: Path | None) -> NativeExecutor:
    plan, shared = record_plan(model.config, model.weights, 64), None
    if folder:
        key = fingerprint.packed_key(plan, model.weights)
        shared = SharedWeights(key, formulas.weight_bytes(plan), folder)
    return NativeExecutor(plan, model.weights, n_blocks=4, n_threads=2, shared=shared)


@pytest.mark.parametrize("fmt", [*BLOCK_FORMATS, *FLOAT_FORMATS])
def test_logits_are_the_same_bits(fmt: str, tmp_path: Path) -> None:
    model = tiny_model("llama", formats=(fmt,))
    alone, *sharing = (executor_of(model, folder) for folder in (None, tmp_path, tmp_path))
    assert len(files(tmp_path)) == 1
    expected = run_tokens(alone, TOKENS, chunk=64)
    for executor in sharing:
        assert executor.weight_bytes == alone.weight_bytes
        np.testing.assert_array_equal(run_tokens(executor, TOKENS, chunk=5), expected)
    sharing[0].close()  # who packed leaves first
    np.testing.assert_array_equal(run_tokens(sharing[1], TOKENS, chunk=64), expected)
    sharing[1].close()
    alone.close()
    assert not files(tmp_path)


@pytest.mark.parametrize("arch", ["qwen2moe", "gemma3", "phi3"])
def test_whatever_the_architecture_packs(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    made = [executor_of(model, folder) for folder in (None, tmp_path, tmp_path)]
    first, *others = (run_tokens(executor, TOKENS, chunk=64) for executor in made)
    for logits in others:
        np.testing.assert_array_equal(logits, first)
    for executor in made:
        executor.close()


@pytest.mark.skipif(IS_SANITIZED, reason="memory comes from malloc then")
def test_it_is_in_memory_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = [executor_of(model, tmp_path) for _ in range(3)]
    for executor in made:
        run_tokens(executor, TOKENS, chunk=64)
    (name,) = files(tmp_path)
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"/{name}\n(?:\w+: .*\n)*?Pss: +(\d+) kB", maps)
    assert len(found) == 3
    whole_kb = formulas.weight_bytes(model.plan()) / 1024
    assert sum(map(int, found)) <= whole_kb + 4 * 4  # a page for each, by rounding
    for executor in made:
        executor.close()


def test_other_weights_are_another_copy(tmp_path: Path) -> None:
    made = [executor_of(tiny_model("llama", seed=seed), tmp_path) for seed in (0, 1)]
    assert len(files(tmp_path)) == 2
    for executor in made:
        executor.close()


def test_runs_of_rows_count_as_weights() -> None:
    """phi3 keeps query, key and value in one tensor; the plan reads each by its rows."""
    model = load_model(gguf_of("phi3"), context=64)
    try:
        assert any(tensor.name not in model.tensors() for tensor in model.plan.tensors)
        before = fingerprint.fingerprint(model)
        fused = next(name for name in model.tensors() if name.endswith("attn_qkv.weight"))
        tensor = model.tensors()[fused]
        others = dict(model.tensors())
        others[fused] = StoredTensor(tensor.format, tensor.shape, tensor.data[::-1].copy())
        keys = {
            fingerprint.packed_key(model.plan, StoredWeights(tensors))
            for tensors in (model.tensors(), others)
        }
        assert len(keys) == 2
        model.tensors = lambda: others  # type: ignore[method-assign]
        assert fingerprint.fingerprint(model) != before
    finally:
        model.close()


def test_bad_values_leave_nothing(tmp_path: Path) -> None:
    model = tiny_model("llama", formats=("F32",))
    name = "blk.0.ffn_up.weight"
    tensors = {each: model.weights._tensor(each) for each in model.weights.names()}
    values = model.weights.dequantized(name)
    values[3, 4] = np.nan
    tensors[name] = StoredTensor.from_floats(values)
    bad = TinyModel(model.config, StoredWeights(tensors))
    for _ in range(2):  # and the next process is told the same
        with pytest.raises(FileFormatError, match=r"blk\.0\.ffn_up"):
            executor_of(bad, tmp_path)
        assert not files(tmp_path)


def test_a_killed_packer_leaves_no_weights(tmp_path: Path) -> None:
    killed_while_open(tmp_path, "key", "half")
    assert len(files(tmp_path)) == 1
    shared = SharedWeights("key", SIZE, tmp_path)
    assert not shared.is_there
    memory, is_packed = shared.open()
    assert not is_packed
    assert not memory.any()
    shared.close()
    assert not files(tmp_path)


def test_what_the_killed_leave_is_used_or_removed(tmp_path: Path) -> None:
    killed_while_open(tmp_path, "key", "whole")
    shared = SharedWeights("key", SIZE, tmp_path)
    memory, is_packed = shared.open()
    assert is_packed
    assert (memory == 7).all()
    shared.close()
    killed_while_open(tmp_path, "key", "whole")
    other = SharedWeights("other", SIZE, tmp_path)
    other.open()
    assert files(tmp_path) == {"other.part"}
    other.close()


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    first, second = (SharedWeights("key", SIZE, tmp_path) for _ in range(2))
    memory, is_packed = first.open()
    assert not is_packed
    found: list[tuple[np.ndarray, bool]] = []
    waiting = threading.Thread(target=lambda: found.append(second.open()))
    waiting.start()
    time.sleep(0.05)
    assert not found
    memory[:] = 3
    first.publish()
    waiting.join(10)
    assert found[0][1]
    assert (found[0][0] == 3).all()
    with pytest.raises(ValueError, match="read-only"):
        found[0][0][0] = 1
    first.close()
    assert files(tmp_path) == {"key"}
    second.close()
    assert not files(tmp_path)


def test_many_come_and_go(tmp_path: Path) -> None:
    """Whoever opens finds all of it, or is the one to write it."""
    wrong: list[str] = []

    def visit() -> None:
        for _ in range(30):
            shared = SharedWeights("key", SIZE, tmp_path)
            memory, is_packed = shared.open()
            if not is_packed:
                memory[:] = 9
                shared.publish()
            if not (memory == 9).all():
                wrong.append("not whole")
            shared.close()

    visitors = [threading.Thread(target=visit) for _ in range(8)]
    for each in visitors:
        each.start()
    for each in visitors:
        each.join(60)
    assert not wrong
    assert not any(each.is_alive() for each in visitors)
    assert not files(tmp_path)


def test_who_still_holds_the_memory_keeps_nobody_waiting(tmp_path: Path) -> None:
    first, second = (SharedWeights("key", SIZE, tmp_path) for _ in range(2))
    memory, _ = first.open()
    first.publish()
    first.close()
    assert second.open()[1] is False
    assert not memory.any()
    second.close()


def test_too_little_shared_memory_is_told_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NotEnoughMemory, match=rf"take {SIZE} bytes of shared memory, \d+ are free"):
        SharedWeights("key", SIZE, tmp_path).open()
    assert not files(tmp_path)
    monkeypatch.undo()
    after = SharedWeights("key", SIZE, tmp_path)
    assert after.open()[1] is False
    after.close()


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"martlet-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UnsupportedError, match="is open to others"):
        SharedWeights("key", SIZE, tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UnsupportedError, match="is open to others"):
        SharedWeights("key", SIZE, tmp_path)


def test_other_systems_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="on Linux alone"):
        SharedWeights("key", SIZE, tmp_path)


def test_what_does_not_pack_refuses() -> None:
    path = gguf_of("llama")
    with pytest.raises(UnsupportedError, match="executor reference does not share weights"):
        load_model(path, executor="reference", share_weights=True, context=64)
    for other in ({"repack": False}, {"mmap_experts": True}):
        with pytest.raises(UnsupportedError, match="choose one"):
            load_model(path, executor="native", share_weights=True, context=64, **other)


def test_a_model_says_that_it_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "FOLDER", tmp_path)
    model = load_model(gguf_of("llama"), executor="native", share_weights=True, context=64)
    assert "weights shared" in model.executor_reason
    assert len(files(tmp_path)) == 1
    model.close()
    assert not files(tmp_path)
