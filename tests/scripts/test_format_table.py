"""docs/formats.md is what the code says."""

from pathlib import Path

from martlet.quant.formats import FORMATS
from martlet.scripts.architecture_table import put_between
from martlet.scripts.format_table import packed_bits, table

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_is_current() -> None:
    # After a change: python -m martlet.scripts.format_table docs/formats.md
    page = PAGE.read_text()
    assert put_between(page, table()) == page


def test_bits_by_hand() -> None:
    assert packed_bits(FORMATS["MXFP4"]) == 4 + 8 / 32  # a nibble, and an exponent for every 32
    assert packed_bits(FORMATS["TQ1_0"]) == 2 + 16 / 256
    assert packed_bits(FORMATS["Q4_K"]) == 4 + 2 * 8 / 32 + 2 * 16 / 256
