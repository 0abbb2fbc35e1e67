"""Prints the plan of a model file: one line per op, then what it needs.

    python scripts/show_plan.py model.gguf [--rows 256]

The best description of an architecture, and the text that tests/data/plans keeps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.config import ModelConfig
from martlet.runtime.models import record_plan
from martlet.runtime.plan import Plan
from martlet.runtime.weights import StoredWeights


def plan_of_file(path: Path, max_rows: int) -> Plan:
    with GGUFFile.open(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        config = ModelConfig.from_metadata(file.metadata, shapes)
        return record_plan(config, StoredWeights(file.tensors), max_rows)


def summary(plan: Plan) -> str:
    return (
        f"{len(plan.ops)} ops, {len(plan.tensors)} tensors, "
        f"arena of {plan.arena_bytes:,} bytes for {plan.max_rows} rows, "
        f"{plan.kv_bytes_per_token():,} KV bytes per token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the plan of a model file.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=256, help="rows of a step at most")
    args = parser.parse_args()
    plan = plan_of_file(args.path, args.rows)
    print(plan, end="")
    print(summary(plan))


if __name__ == "__main__":
    main()
