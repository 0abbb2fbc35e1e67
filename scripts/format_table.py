"""The table of weight formats in docs/formats.md, made from what the code knows of them.

python -m martlet.scripts.format_table docs/formats.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from martlet.quant.encode import ENCODABLE
from martlet.quant.formats import FORMATS, Format
from martlet.runtime.estimate import FLOAT_BYTES, PACKINGS
from martlet.scripts.architecture_table import put_between

_PACKED_WEIGHTS = 32 * 32  # of a packed block; a header stands before eight


def table() -> str:
    """Markdown, one row per format."""
    rows = [
        "| format | weights of a block | bits per weight in the file | in memory | written |",
        "|---|--:|--:|--:|---|",
    ]
    for fmt in sorted(FORMATS.values(), key=lambda fmt: -fmt.bits_per_weight):
        cells = (
            str(fmt.block),
            _number(fmt.bits_per_weight),
            _number(packed_bits(fmt)),
            "yes" if fmt.name in ENCODABLE else "",
        )
        rows.append(f"| {fmt.name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def packed_bits(fmt: Format) -> float:
    """Per weight, once the native executor has loaded them."""
    if fmt.name in FLOAT_BYTES:
        return 8 * FLOAT_BYTES[fmt.name]
    packing = PACKINGS[fmt.name]
    return 8 * (packing.block_bytes + packing.header_bytes / 8) / _PACKED_WEIGHTS


def _number(bits: float) -> str:
    return f"{bits:.4f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(put_between(path.read_text(), table()))
