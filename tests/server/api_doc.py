"""The tables of docs/api.md, out of the request models themselves.

`python -m tests.server.api_doc` writes them anew between their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from martlet.server import (
    anthropic,
    embeddings,
    ollama,
    ollama_embed,
    openai_routes,
    rerank,
    tokens,
)
from martlet.server.asking import Fields

DOC = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES = {**openai_routes.ROUTES, **anthropic.ROUTES, **ollama.ROUTES}
KINDS: dict[str, type[Fields]] = {
    **{path: route.kind for path, route in ROUTES.items()},
    **{path: kind for path, (kind, _) in tokens.ROUTES.items()},
    embeddings.PATH: embeddings.EmbeddingsRequest,
    rerank.PATHS[0]: rerank.RerankRequest,
    "/api/embed": ollama_embed.OllamaEmbed,
    "/api/embeddings": ollama_embed.OllamaEmbeddings,
}
BEGIN, END = "<!-- fields of {} -->", "<!-- end -->"


def honoured(kind: type[Fields], prefix: str = "") -> Iterator[str]:
    for name in kind.model_fields:
        if name in kind.NESTED:
            yield from honoured(kind.NESTED[name], f"{prefix}{name}.")
        else:
            yield prefix + name


def no_effect(kind: type[Fields], prefix: str = "") -> Iterator[str]:
    yield from (prefix + name for name in sorted(kind.RULES.no_effect - kind.model_fields.keys()))
    for name, nested in kind.NESTED.items():
        yield from no_effect(nested, f"{prefix}{name}.")


def refused(kind: type[Fields], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, rule in kind.RULES.refused.items():
        if name not in kind.model_fields:
            passes = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            yield f"`{prefix}{name}`", rule.reason, passes
    for name, nested in kind.NESTED.items():
        yield from refused(nested, f"{prefix}{name}.")


def listed(names: Iterator[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def table(path: str) -> str:
    kind = KINDS[path]
    rows = "\n".join(f"| {name} | {reason} | {passes} |" for name, reason, passes in refused(kind))
    return (
        f"Honoured: {listed(honoured(kind))}.\n\n"
        f"Accepted, without a meaning here: {listed(no_effect(kind))}.\n\n"
        f"| refused | why | values that pass |\n|---|---|---|\n{rows}\n"
    )


def updated(text: str) -> str:
    for path in KINDS:
        begin = BEGIN.format(path)
        pattern = f"({re.escape(begin)}\n).*?({END})"
        written = table(path)
        text, n = re.subn(pattern, lambda m, w=written: f"{m[1]}{w}{m[2]}", text, flags=re.DOTALL)
        assert n == 1, f"{DOC.name} has {n} places for {path}, which begin with {begin}"
    return text


if __name__ == "__main__":
    DOC.write_text(updated(DOC.read_text()))
