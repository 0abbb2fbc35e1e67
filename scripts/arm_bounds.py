"""What ARM cores would make of the matrix kernels, calculated: llvm-mca on the inner loops.

    python scripts/arm_bounds.py [--mca llvm-mca-19]

Wants gcc-aarch64-linux-gnu and llvm-mca 17 or newer (Debian's llvm-19). Compiles csrc/kernels.c for
each level, finds in the assembly the innermost loop of a product and prints its multiply-adds per
cycle as a table, with the part that this is of what the core's multiply pipes could do. Nothing is
measured: llvm-mca knows the pipes, latencies and queues of a core, but neither its caches nor its
branches.

The bound is calculated alike, from a run of independent multiply instructions. Must not know: what
the loops compute.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, Missing, exit_code, need, run  # type: ignore[import-not-found]

COMPILER = "aarch64-linux-gnu-gcc"
# As csrc/CMakeLists.txt has them.
FLAGS = (
    *("-std=gnu11", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),
)
AS_WRITTEN = "-fno-schedule-insns"
LEVELS = {
    "neon": ("-march=armv8-a", AS_WRITTEN),
    "dotprod": ("-march=armv8.2-a+dotprod", AS_WRITTEN),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
MULTIPLY_ADDS = {
    **dict.fromkeys(("smull", "smull2", "smlal", "smlal2"), 8),
    **dict.fromkeys(("sdot", "usdot"), 16),
    "smmla": 32,
}
MULTIPLY = {"neon": "smlal v{}.8h, v30.8b, v31.8b", "dotprod": "sdot v{}.4s, v30.16b, v31.16b"}
MULTIPLY["i8mm"] = "smmla v{}.4s, v30.16b, v31.16b"
# Of csrc/kernels_matmul.h: the class of each format's products.
FORMATS = {"Q4_0": "b8", "Q4_K": "b0m", "Q6_K": "b32s", "Q8_0": "b128"}
ITERATIONS = 1000
# Older ones know no Neoverse V2, and calculate other figures for the cores they know.
OLDEST_LLVM = 17
BLOCK = 32 * 16  # multiply-adds of one block of 16 rows and a column


@dataclass(frozen=True)
class Core:
    names: str
    level: str
    model: str  # llvm's
    width: int  # instructions that enter in a cycle, by Arm's optimization guides


CORES = (
    # llvm takes the A57's table for the A72, and has none for the A76, whose design the N1 is.
    Core("Cortex-A72", "neon", "cortex-a72", 3),
    Core("Cortex-A76, Neoverse N1", "dotprod", "neoverse-n1", 4),
    Core("Neoverse V1", "i8mm", "neoverse-v1", 8),
    Core("Neoverse V2", "i8mm", "neoverse-v2", 8),
)


def functions(assembly: str) -> dict[str, list[str]]:
    """Instructions and labels of every function, without comments and directives."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in assembly.splitlines():
        if name := re.match(r"([A-Za-z_]\w*):", line):
            lines = found.setdefault(name[1], [])
        elif (text := line.split("//")[0].strip()) and (is_label(text) or text[0] != "."):
            lines.append(text)
    return found


def is_label(line: str) -> bool:
    return line.endswith(":")


def multiply_adds(lines: list[str]) -> int:
    """Of one pass through the lines; a long multiply counts where it multiplies bytes."""
    total = 0
    for line in lines:
        name, *operands = line.split(None, 1)
        if not name.startswith("sm") or name == "smmla" or ".8h" in operands[0]:
            total += MULTIPLY_ADDS.get(name, 0)
    return total


def loops(lines: list[str]) -> list[list[str]]:
    """Every stretch between a label and a branch back to it."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if is_label(line)}
    found = []
    for i, line in enumerate(lines):
        target = re.match(r"(?:b\S*|cbn?z|tbn?z)\s.*?(\.L\d+)$", line)
        if target and labels.get(target[1], i) < i:
            found.append(lines[labels[target[1]] : i + 1])
    return found


def hot_loop(lines: list[str], at_a_time: int) -> list[str]:
    """The shortest loop that makes so many multiply-adds, or a multiple, in a pass."""
    fitting = [loop for loop in loops(lines) if (n := multiply_adds(loop)) and n % at_a_time == 0]
    least = min(map(multiply_adds, fitting))
    return min((loop for loop in fitting if multiply_adds(loop) == least), key=len)


def body_of(found: dict[str, list[str]], name: str) -> list[str]:
    """The compiler lets equal functions share one body."""
    lines = found[name]
    match [line.split() for line in lines if not is_label(line)]:
        case [["b", other]]:
            return body_of(found, other)
    return lines


def cycles(lines: list[str], core: Core, mca: str) -> float:
    """Of one pass through the lines, repeated. llvm-mca counts the parts of instructions that
    enter, a core also the instructions."""
    code = [re.sub(r"\.L\w+", "0", line) for line in lines if not is_label(line)]
    command = [mca, "-mtriple=aarch64", f"-mcpu={core.model}", "-mattr=+dotprod,+i8mm"]
    command.append(f"-iterations={ITERATIONS}")
    done = subprocess.run(command, input="\n".join(code), capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if total is None:
        raise Missing(f"{mca} cannot do it: {done.stderr.splitlines()[0]}")
    return max(int(total[1]) / ITERATIONS, len(code) / core.width)


def rate(lines: list[str], core: Core, mca: str) -> float:
    """Multiply-adds per cycle."""
    return multiply_adds(lines) / cycles(lines, core, mca)


def bound(core: Core, mca: str) -> float:
    independent = [MULTIPLY[core.level].format(i) for i in range(16)]
    return rate(independent, core, mca)


def compile_level(level: str, folder: Path) -> dict[str, list[str]]:
    out = folder / f"{level}.s"
    command = [COMPILER, *FLAGS, *LEVELS[level], f"-DMT_ISA={level}", "-DMT_NEON", "-S"]
    run(*command, str(ROOT / "csrc/kernels.c"), "-o", str(out))
    return functions(out.read_text())


def rows_of(core: Core, found: dict[str, list[str]], mca: str) -> list[str]:
    most = bound(core, mca)
    wanted = {
        "4 columns": [(f"mm_{FORMATS[name]}_4", 1) for name in FORMATS],
        "2 columns, packed": [(f"direct_{name.lower()}", 2 * BLOCK) for name in FORMATS],
        "1 column, packed": [(f"direct_{name.lower()}", BLOCK) for name in FORMATS],
    }
    rows = []
    for case, products in wanted.items():
        cells = []
        for name, at_a_time in products:
            reached = rate(hot_loop(body_of(found, name), at_a_time), core, mca)
            cells.append(f"{reached:.1f} ({reached / most:.0%})".replace("%", " %"))
        rows.append(f"| {core.names} (`{core.level}`), {case} | {most:.0f} | {' | '.join(cells)} |")
    return rows


def find_mca(named: str | None) -> str:
    names = [named] if named else [f"llvm-mca-{i}" for i in range(24, 16, -1)] + ["llvm-mca"]
    mca = next((name for name in names if shutil.which(name)), None)
    remedy = "the package llvm-19, for one, brings it"
    if mca is None:
        wanted = named or f"llvm-mca {OLDEST_LLVM} or newer"
        raise Missing(f"{wanted} is not installed; {remedy}")
    version = re.search(r"LLVM version (\d+)", run(mca, "--version"))
    if version is None or int(version[1]) < OLDEST_LLVM:
        said = f"of LLVM {version[1]}" if version else "of an unknown version"
        raise Missing(f"{mca} is {said}, and llvm-mca {OLDEST_LLVM} or newer is needed; {remedy}")
    need(COMPILER, "gcc-aarch64-linux-gnu")
    return mca


def print_table(mca: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        levels = {level: compile_level(level, Path(folder)) for level in LEVELS}
    print(f"| multiply-adds per cycle | bound | {' | '.join(FORMATS)} |")
    print(f"|---|--:|{'--:|' * len(FORMATS)}")
    for core in CORES:
        print("\n".join(rows_of(core, levels[core.level], mca)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Calculated speed of the matrix kernels on ARM.")
    parser.add_argument("--mca", help="the llvm-mca program")
    args = parser.parse_args()
    return exit_code(lambda: print_table(find_mca(args.mca)))


if __name__ == "__main__":
    sys.exit(main())
