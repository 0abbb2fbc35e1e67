"""For all tests: hypothesis measures no time, as the machine may be busy with other things; and
files that take minutes begin first, so that no core waits for one of them at the end."""

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

TAKE_MINUTES = ("test_sanitize.py", "test_emulate.py", "test_fuzz.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in TAKE_MINUTES)
