"""Under what conditions something is measured: the machine, the model's file, martlet itself.
Owns reading them, under flat names that records are compared by; must not know what is measured."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from martlet.runtime.machine import ROOT, allowed_cpus, cpu_folder, cpu_quota, memory, read
from martlet.scripts.doctor import cpu_features, cpu_name, version

HASH_BYTES = 1 << 20
# Strongest first; a feature of /proc/cpuinfo each.
ISAS = {
    "amx_int8": "amx",
    "avx512_vnni": "avx512-vnni",
    "avx512f": "avx512",
    "avx_vnni": "avx-vnni",
    "avx2": "avx2",
    "i8mm": "i8mm",
    "asimddp": "dotprod",
    "asimd": "neon",
}


def machine_conditions(root: Path = ROOT) -> dict[str, Any]:
    """What is not known is left out: whoever compares will say that it is missing."""
    features = cpu_features()
    quota = cpu_quota(root)
    found = {
        "cpu": cpu_name(),
        "isa": next((name for feature, name in ISAS.items() if feature in features), None),
        "cores": len(allowed_cpus()),
        "quota": "none" if quota is None else f"{quota:g}",
        "memory_bytes": memory(root).total_bytes,
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "governor": governor(root),
        "load_before": load_average(),
    }
    return {name: value for name, value in found.items() if value is not None}


def governor(root: Path = ROOT) -> str:
    """Of the CPUs we may use; virtual machines have none of their own."""
    paths = (cpu_folder(root, cpu) / "cpufreq/scaling_governor" for cpu in allowed_cpus())
    names = {name for path in paths if (name := read(path))}
    return "+".join(sorted(names)) or "none"


def load_average() -> float | None:
    """Programs that wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def file_conditions(path: Path) -> dict[str, Any]:
    """Reads the whole file once: about a second per gigabyte."""
    from martlet.quant.gguf_file import GGUFFile

    with GGUFFile.open(path) as file:
        formats: dict[str, int] = {}
        for tensor in file.tensors.values():
            name = tensor.format.name
            formats[name] = formats.get(name, 0) + tensor.data.nbytes
        total = sum(formats.values())
        shares = sorted(formats.items(), key=lambda item: -item[1])
        kinds = " ".join(f"{name}:{n / total:.0%}" for name, n in shares if n / total >= 0.005)
    return {"model_file": path.name, "model_sha256": sha256(path), "model_type": kinds}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()


def martlet_versions() -> dict[str, Any]:
    import numpy as np

    numbers = {"martlet": version(), "python": platform.python_version(), "numpy": np.__version__}
    return {"versions": " ".join(f"{name} {number}" for name, number in numbers.items())}
