"""`martlet doctor`: what this machine offers, what martlet makes of it, and what to do about it.
Owns the report; the choices themselves are the runtime's, asked here, not repeated."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import typer
from martlet.scripts import options
from martlet.scripts.console import print_json
from martlet.scripts.models import cache_folder

# Instructions that some kernel uses, as Linux spells them.
NOTABLE = (
    *(
        "ssse3",
        "sse4_1",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
    ),
    *("avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


# Exit codes: a script learns from them whether a model runs here at full speed, slowly, or not.
SLOW, NOTHING_RUNS = 1, 2
SCARCE_BYTES = 512 << 20


def doctor(as_json: options.JsonOption = False) -> None:
    """Report CPU features, chosen ISA and executor, threads and why, memory, cache, and what to
    change. Exit code 1: models run, but not on native code; 2: none runs."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        for key, value in report.items():
            print(f"{key.replace('_', ' '):<12}{sentence(value)}")
    if code := exit_code(report):
        raise typer.Exit(code)


def exit_code(report: dict[str, Any]) -> int:
    chosen = report["executor"]["chosen"]
    if chosen == "native" and report["isa"]["chosen"].startswith("none"):  # a bad MARTLET_ISA
        return NOTHING_RUNS
    return 0 if chosen == "native" else SLOW if chosen == "numba" else NOTHING_RUNS


def sentence(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')}: {sentence(v)}" for key, v in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def examine() -> dict[str, Any]:
    report = {
        "martlet": version(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "features": cpu_features(),
        "executor": executor_report(),
        "isa": isa_report(),
        "threads": threads_report(),
        "memory": memory_report(),
        "cache": cache_report(),
    }
    return {**report, "advice": advice(report)}


def advice(report: dict[str, Any]) -> list[str]:
    """What to change, a sentence each; nothing where all is well."""
    from martlet.runtime.machine import memory

    said = []
    executor, isa = report["executor"], report["isa"]["chosen"]
    if executor["chosen"] != "native":
        said.append("install a C compiler and reinstall martlet: native code is far faster.")
    elif isa == "scalar":
        said.append("no kernels here are made for this CPU: expect a tenth of the usual speed.")
    available = memory().available_bytes
    if available < SCARCE_BYTES:
        said.append(
            f"only {available >> 20} MiB of memory are free; `martlet estimate` says what fits, "
            "--no-repack and a small --kv-bytes take less (docs/small-machines.md)."
        )
    if read(Path("/sys/kernel/mm/transparent_hugepage/enabled")).endswith("[never]"):
        said.append(
            "huge pages are off: `echo madvise` into transparent_hugepage/enabled (as root)."
        )
    clock = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    # Under these two drivers powersave is the name of what adapts.
    adapts = read(clock / "scaling_driver") in ("intel_pstate", "amd-pstate-epp")
    if read(clock / "scaling_governor") == "powersave" and not adapts:
        said.append("the CPU governor is powersave: with schedutil or performance it is faster.")
    if not report["cache"]["writable"].startswith("yes"):
        said.append("the folder for models cannot be written: set MARTLET_CACHE to one that can.")
    return said


def read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("martlet")
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    cpuinfo = read(Path("/proc/cpuinfo"))
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    cpuinfo = read(Path("/proc/cpuinfo"))
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    found = set(match[1].split()) if match else set()
    return [name for name in NOTABLE if name in found]


def executor_report() -> dict[str, str]:
    """The one `auto` takes, and for every other one whether it could be had."""
    from martlet.quant.errors import MartletError
    from martlet.runtime.executors.choice import EXECUTORS, executor_class

    report = {}
    for name in EXECUTORS:
        try:
            executor_class(name)
            report[name] = "available"
        except (ImportError, OSError, MartletError) as error:
            report[name] = f"not available ({error})"
    usable = [name for name, state in report.items() if state == "available"]
    # The reference is a definition, too slow to be taken without being asked for.
    chosen = usable[0] if usable[0] != "reference" else "none; ask for --executor reference"
    return {"chosen": chosen, **report}


def isa_report() -> dict[str, Any]:
    """What native would run on here; MARTLET_ISA counts, and a bad value of it is told."""
    from martlet.quant.errors import MartletError

    try:
        from martlet.runtime.executors.native_library import Library

        library = Library()
        isas = dict(library.isas())
        chosen = list(isas)[library.isa_index(None)]
    except (ImportError, OSError, MartletError) as error:
        return {"chosen": f"none ({error})"}
    return {
        "chosen": chosen,
        "supported": [name for name, supported in isas.items() if supported],
        "built_but_not_supported": [name for name, supported in isas.items() if not supported],
    }


def threads_report() -> dict[str, Any]:
    from martlet.runtime.machine import choose_threads

    choice = choose_threads()
    return {"count": choice.count, "why": choice.reason}


def memory_report() -> dict[str, str]:
    from martlet.runtime.machine import memory

    found = memory()
    gib = {"total": found.total_bytes / 2**30, "available": found.available_bytes / 2**30}
    return {name: f"{value:.1f} GiB" for name, value in gib.items()}


def cache_report() -> dict[str, str]:
    folder = cache_folder()
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    writable = "yes" if os.access(nearest, os.W_OK) else "no; set MARTLET_CACHE"
    return {"folder": str(folder), "free": f"{free / 2**30:.1f} GiB", "writable": writable}


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["doctor", *sys.argv[1:]])
