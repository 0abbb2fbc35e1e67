"""docs/architectures.md is what the code says."""

from pathlib import Path

from martlet.runtime.architectures import ARCHITECTURES
from martlet.scripts.architecture_table import SIZES, table, written_into

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_is_current() -> None:
    # After a change: python -m martlet.scripts.architecture_table docs/architectures.md
    page = PAGE.read_text()
    assert page == written_into(page)


def test_every_architecture_has_a_row_and_sizes() -> None:
    assert all(f"| `{name}` |" in table() for name in ARCHITECTURES)
    assert SIZES.keys() <= ARCHITECTURES.keys()
