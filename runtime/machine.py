"""What this machine lets us use: threads with the reason for their number, and memory.

Owns: reading affinity, topology, cgroup limits and free memory. Must not know: models, executors
or what the threads will do. Every function takes the root of the file system, so that tests can
show it another machine.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# Cores with less than this share of the strongest core's capacity are left out unless asked for:
# work is dealt out by speed, but where memory binds they add little.
STRONG_SHARE = 0.6
# Where the kernel says what a core can do: by capacity, else by clock, which says less.
CAPACITY_FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True)
class ThreadChoice:
    count: int
    reason: str


def choose_threads(requested: int | None = None, *, root: Path = ROOT) -> ThreadChoice:
    """Physical performance cores, within the affinity mask, at most the cgroup's quota.

    A second thread on one core shares its execution units, a slow core adds little, and threads
    beyond a quota are stopped in the middle of a step.
    """
    cpus = allowed_cpus()
    if requested is not None:
        over = f", more than the {len(cpus)} allowed CPUs: slower" if requested > len(cpus) else ""
        return ThreadChoice(requested, f"as asked{over}")
    if sys.platform == "darwin":
        return darwin_threads()
    strong = performance_cpus(cpus, root)
    count = len(physical_cores(strong, root))
    reason = f"{count} physical performance cores among {len(cpus)} allowed CPUs"
    if len(strong) < len(cpus):
        n_all = len(physical_cores(cpus, root))
        reason += f", without {len(cpus) - len(strong)} slower ones (--threads {n_all}: with them)"
    quota = cpu_quota(root)
    if quota is not None and max(1, int(quota)) < count:
        return ThreadChoice(max(1, int(quota)), f"CPU quota of {quota:g} below {reason}")
    return ThreadChoice(count, reason)


def allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def performance_cpus(cpus: list[int], root: Path) -> list[int]:
    """Without the efficiency cores, where the kernel tells them apart."""
    hybrid = read(root / "sys/devices/cpu_core/cpus")  # x86 with two kinds of cores
    if hybrid is not None:
        return sorted(set(cpus) & set(cpu_list(hybrid))) or cpus
    known = capacities(cpus, root)
    return [cpu for cpu in cpus if known.get(cpu, 1.0) >= STRONG_SHARE]


def capacities(cpus: list[int], root: Path) -> dict[int, float]:
    """What each CPU can do, of what the strongest can; empty where the kernel does not tell."""
    for name in CAPACITY_FILES:
        texts = {cpu: read(cpu_folder(root, cpu) / name) or "" for cpu in cpus}
        known = {cpu: int(text) for cpu, text in texts.items() if text.isdigit() and int(text)}
        if known:
            strongest = max(known.values())
            return {cpu: value / strongest for cpu, value in known.items()}
    return {}


def physical_cores(cpus: Iterable[int], root: Path) -> set[str]:
    """One name per core: the list of the CPUs that share it."""
    siblings = ((cpu, cpu_folder(root, cpu) / "topology/thread_siblings_list") for cpu in cpus)
    return {read(path) or str(cpu) for cpu, path in siblings}


def darwin_threads() -> ThreadChoice:
    for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        count = sysctl(name)
        if count:
            return ThreadChoice(count, f"{count} physical performance cores ({name})")
    count = os.cpu_count() or 1
    return ThreadChoice(count, f"{count} logical CPUs")


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time the tightest cgroup around us grants; None without a limit."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        both = (read(folder / "cpu.max") or "").split()  # version 2: "max 100000"
        if not both:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            both = [read(folder / name) or "" for name in names]
        if len(both) == 2 and all(part.isdigit() for part in both) and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))  # "max" and -1 are no digits: no limit
    return min(quotas, default=None)


@dataclass(frozen=True)
class Memory:
    """total_bytes is 0 where the system does not tell."""

    total_bytes: int
    available_bytes: int
    """What can be taken without swapping, the cgroup's limit included."""
    swap_bytes: int = 0
    """Free for what does not fit. A cgroup's limit is taken to leave none."""
    is_measured: bool = True
    """False: available_bytes is a guess on the safe side."""

    @property
    def most_bytes(self) -> int:
        """Beyond this, a system that keeps its promises has nothing left."""
        return self.available_bytes + self.swap_bytes if self.is_measured else self.total_bytes


def memory(root: Path = ROOT) -> Memory:
    if sys.platform == "darwin":
        total = sysctl("hw.memsize")
        # No cheap honest figure; half is rarely too much.
        return Memory(total, total // 2, is_measured=False)
    if sys.platform == "win32":
        return windows_memory()
    lines = (read(root / "proc/meminfo") or "").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    total, available = kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10
    swap, host = kib.get("SwapFree", 0) << 10, total
    for folder in cgroup_folders(root, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            both = [read(folder / limit) or "", read(folder / used) or ""]
            if not all(part.isdigit() for part in both) or int(both[0]) >= host:
                continue  # "max", or what version 1 says for it
            total, swap = min(total, int(both[0])), 0
            left = int(both[0]) - int(both[1]) + reclaimable_bytes(folder)
            available = min(available, max(0, left))
    return Memory(total, available, swap)


def reclaimable_bytes(cgroup: Path) -> int:
    """Pages of files that are counted as used and go when memory is asked for."""
    words = [line.split() for line in (read(cgroup / "memory.stat") or "").splitlines()]
    counts = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}
    # Version 1 has the sums over groups inside under other names.
    names = ("inactive_file", "active_file")
    return sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in names)


def resident_bytes(root: Path = ROOT) -> int:
    """Memory this process holds now; at its peak where the system does not tell."""
    fields = (read(root / "proc/self/statm") or "").split()
    if len(fields) > 1:
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def give_back_freed() -> None:
    """Hands memory that is free within the C library's heaps back to the system. glibc keeps it
    (malloc_trim(3)): what lives on in between holds the heaps of threads that loaded a model."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, TypeError, OSError):  # another C library, or Windows
        return
    trim(ctypes.c_size_t(0))


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Our cgroup and all around it, for version 2 and for this controller of version 1."""
    folders = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3 or (parts[1] and controller not in parts[1].split(",")):
            continue
        top = root / "sys/fs/cgroup" / parts[1]
        inside = Path(parts[2].lstrip("/"))
        folders += [top / inside, *(top / parent for parent in inside.parents)]
    return folders


def cpu_folder(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def cpu_list(text: str) -> list[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def sysctl(name: str, run: Callable[..., bytes] = subprocess.check_output) -> int:
    try:
        return int(run(["sysctl", "-n", name], stderr=subprocess.DEVNULL, timeout=5))
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def windows_memory() -> Memory:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return Memory(status.total, status.available)
