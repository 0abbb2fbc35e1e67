"""Threads and memory on machines made of files."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from martlet.runtime import machine
from martlet.runtime.machine import choose_threads, cpu_list, cpu_quota, memory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores with two CPUs each: 0 and 4 share a core, 1 and 5, …"""
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(range(8)))
    for cpu in range(8):
        write(tmp_path, f"{CPU}/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    return tmp_path


CPU = "sys/devices/system/cpu"


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{text}\n")


def test_siblings_count_once(root: Path) -> None:
    assert choose_threads(root=root).count == 4


def test_the_affinity_mask_limits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [0, 4, 5])
    choice = choose_threads(root=root)
    assert choice.count == 2
    assert "3 allowed CPUs" in choice.reason


def test_efficiency_cores_of_x86_are_left_out(root: Path) -> None:
    write(root, "sys/devices/cpu_core/cpus", "0-1,4-5")
    assert choose_threads(root=root).count == 2


def test_weak_cores_of_arm_are_left_out(root: Path) -> None:
    for cpu, capacity in enumerate((1024, 1024, 380, 380, 1024, 1024, 380, 380)):
        write(root, f"{CPU}/cpu{cpu}/cpu_capacity", str(capacity))
    assert choose_threads(root=root).count == 2


def test_slower_clocks_count_where_no_capacity_is_told(root: Path) -> None:
    for cpu, clock in enumerate((2400000, 2200000, 1000000, 1000000) * 2):
        write(root, f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq", str(clock))
    choice = choose_threads(root=root)
    assert choice.count == 2, "2.2 GHz of 2.4 is no small core"
    assert "without 4 slower ones (--threads 4: with them)" in choice.reason
    for cpu in range(8):  # a capacity says more than a clock
        write(root, f"{CPU}/cpu{cpu}/cpu_capacity", "1024")
    assert choose_threads(root=root).count == 4


def test_numbers_that_are_none_are_not_known(root: Path) -> None:
    for cpu, text in enumerate(("1024", "0", "x", "") * 2):
        write(root, f"{CPU}/cpu{cpu}/cpu_capacity", text)
    assert machine.capacities(list(range(8)), root) == {0: 1.0, 4: 1.0}
    assert choose_threads(root=root).count == 4


def test_a_quota_and_an_affinity_on_unequal_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu, capacity in enumerate((1024, 1024, 380, 380, 1024, 1024, 380, 380)):
        write(root, f"{CPU}/cpu{cpu}/cpu_capacity", str(capacity))
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [1, 2, 3])
    assert choose_threads(root=root).count == 1
    monkeypatch.setattr(machine, "allowed_cpus", lambda: list(range(8)))
    write(root, "proc/self/cgroup", "0::/app")
    write(root, "sys/fs/cgroup/app/cpu.max", "150000 100000")
    choice = choose_threads(root=root)
    assert choice.count == 1
    assert "CPU quota of 1.5" in choice.reason


def test_only_weak_cores_allowed_are_used_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "sys/devices/cpu_core/cpus", "0-1")
    monkeypatch.setattr(machine, "allowed_cpus", lambda: [2, 3])
    assert choose_threads(root=root).count == 2


@pytest.mark.parametrize(
    ("text", "count"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)]
)
def test_the_quota_is_rounded_down_but_not_to_nothing(root: Path, text: str, count: int) -> None:
    write(root, "proc/self/cgroup", "0::/user/app")
    write(root, "sys/fs/cgroup/user/app/cpu.max", text)
    choice = choose_threads(root=root)
    assert choice.count == count
    assert ("quota" in choice.reason) == (count != 4)


def test_the_tightest_cgroup_around_us_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/user/app")
    write(root, "sys/fs/cgroup/user/app/cpu.max", "300000 100000")
    write(root, "sys/fs/cgroup/user/cpu.max", "150000 100000")
    assert cpu_quota(root) == 1.5


def test_version_1_of_cgroups(root: Path) -> None:
    write(root, "proc/self/cgroup", "3:cpu,cpuacct:/app\n4:memory:/app")
    write(root, "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", "200000")
    write(root, "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us", "100000")
    assert cpu_quota(root) == 2
    write(root, "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", "-1")
    assert cpu_quota(root) is None


def test_an_asked_number_is_taken_with_a_warning_when_it_is_too_high(root: Path) -> None:
    assert choose_threads(3, root=root) == machine.ThreadChoice(3, "as asked")
    assert "more than the 8 allowed" in choose_threads(16, root=root).reason


def test_memory_is_limited_by_the_cgroup(root: Path) -> None:
    write(root, "proc/meminfo", "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable: 3072 kB")
    assert memory(root) == machine.Memory(4096 << 10, 3072 << 10)
    write(root, "proc/self/cgroup", "0::/app")
    write(root, "sys/fs/cgroup/app/memory.max", str(2048 << 10))
    write(root, "sys/fs/cgroup/app/memory.current", str(512 << 10))
    assert memory(root) == machine.Memory(2048 << 10, 1536 << 10)


def test_memory_that_an_outer_cgroup_has_given_away_is_not_free(root: Path) -> None:
    write(root, "proc/meminfo", "MemTotal: 16384 kB\nMemFree: 1 kB\nMemAvailable: 12288 kB")
    write(root, "proc/self/cgroup", "0::/pod/app")
    for folder, limit, used in (("pod/app", 1024, 128), ("pod", 8192, 8000)):
        write(root, f"sys/fs/cgroup/{folder}/memory.max", str(limit << 10))
        write(root, f"sys/fs/cgroup/{folder}/memory.current", str(used << 10))
    assert memory(root) == machine.Memory(1024 << 10, 192 << 10)


def test_this_machine_has_threads_and_memory() -> None:
    assert choose_threads().count >= 1
    assert 0 < memory().available_bytes <= memory().total_bytes


def test_cpu_lists() -> None:
    assert cpu_list("0-3,8") == [0, 1, 2, 3, 8]
    assert cpu_list("") == []


def test_pages_of_files_that_a_cgroup_holds_are_free_for_more(root: Path) -> None:
    write(root, "proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 3072 kB\nSwapFree: 64 kB")
    assert memory(root).most_bytes == (3072 + 64) << 10
    write(root, "proc/self/cgroup", "4:memory:/app")
    folder = "sys/fs/cgroup/memory/app"
    write(root, f"{folder}/memory.limit_in_bytes", str(2048 << 10))
    write(root, f"{folder}/memory.usage_in_bytes", str(1024 << 10))
    write(root, f"{folder}/memory.stat", "inactive_file 1\ntotal_inactive_file 524288\nhierarchy x")
    found = memory(root)
    assert found.available_bytes == 1536 << 10
    assert found.most_bytes == 1536 << 10, "a cgroup's limit leaves no swap to count on"
    write(root, f"{folder}/memory.limit_in_bytes", str(2**63 - 4096))  # none, as version 1 says it
    assert memory(root).available_bytes == 3072 << 10


FREED_BELOW_WHAT_LIVES = """
import ctypes
from martlet.runtime.machine import give_back_freed, resident_bytes
blocks = [ctypes.create_string_buffer(100_000) for _ in range(2_000)]
del blocks[:-1]  # the last one, at the top of the heap, holds the others
kept = resident_bytes()
give_back_freed()
print(kept - resident_bytes())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries give back by themselves"
)
def test_freed_memory_is_given_back() -> None:
    command = [sys.executable, "-c", FREED_BELOW_WHAT_LIVES]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) > 150e6
