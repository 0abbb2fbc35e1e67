"""What docs/api.md says of fields is what the server does with them."""

from __future__ import annotations

import pytest
from martlet.server import create_app

from .api_doc import DOC, ROUTES, table, updated
from .scripted_engine import ScriptedEngine


def test_tables_are_those_of_the_request_models() -> None:
    text = DOC.read_text()
    assert updated(text) == text, "run: python -m tests.server.api_doc"


@pytest.mark.parametrize("path", ROUTES)
def test_a_table_names_each_field_once(path: str) -> None:
    told, rest = table(path).split("Accepted, without")
    bookkeeping, rows = rest.split("| refused |")
    for name in ("model", "cache_salt"):
        assert told.count(f"`{name}`") == 1
    for line in rows.splitlines()[2:]:
        name = line.split("|")[1].strip()
        assert name not in told + bookkeeping


def test_each_route_is_told() -> None:
    engine = ScriptedEngine()
    app = create_app(engine, engine.tokenizer, model_name="tiny")
    text = DOC.read_text()
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    pages = {path for path in paths if path == "/" or "." in path or "/static" in path}
    for path in paths - pages:
        assert f"`{path}`" in text, path
