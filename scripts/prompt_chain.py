"""What prompts begin with, as a chain of digests of their text, and who remembers which.

Owns: the chain of a request's body and the digest of a cache. Must not know: tokens, templates, who
routes. A front that routes by these needs no tokenizer, in whatever dialect the body is.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RUN = 256
"""Characters of one link."""
CHARS_PER_TOKEN = 3
"""Fewer than texts have on average, so that a digest forgets before the cache does."""
MOST_LINKS = 4096
"""That a digest tells: 32 KiB."""
BEFORE = ("model", "cache_salt", "lora", "reasoning_effort", "chat_template_kwargs", "tools")
"""Fields that change the whole prompt, wherever they stand."""
PARTS = ("system", "instructions", "messages", "input", "prompt")


def chain_of(body: Mapping[str, Any]) -> list[int]:
    """A number for each whole run of the prompt's text, of it and all before it. Bodies whose
    prompts begin alike have chains that do."""
    seed = json.dumps([body.get(name) for name in BEFORE], sort_keys=True)
    text = "".join(_text(body[name]) for name in PARTS if name in body)
    links, link = [], hashlib.blake2b(seed.encode(), digest_size=8).digest()
    for start in range(0, len(text) - RUN + 1, RUN):
        run = text[start : start + RUN].encode("utf-8", "surrogatepass")
        link = hashlib.blake2b(run, key=link, digest_size=8).digest()
        links.append(int.from_bytes(link, "little"))
    return links


def _text(part: Any) -> str:
    """Of a list of messages each by itself: a longer conversation begins with a shorter one."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(json.dumps(each, sort_keys=True) for each in part)
    return json.dumps(part, sort_keys=True)


def n_known(chain: Sequence[int], known: Iterable[int]) -> int:
    """Links of the chain that are known without a gap."""
    found = set(known) if not isinstance(known, (set, frozenset, dict)) else known
    for at, link in enumerate(chain):
        if link not in found:
            return at
    return len(chain)


class Digest:
    """Of a cache with room for `pool_tokens`: prompts it has seen. The longest unused go first, and
    ends before beginnings, as blocks of the cache do."""

    def __init__(self, pool_tokens: int) -> None:
        self._most = min(MOST_LINKS, max(1, pool_tokens * CHARS_PER_TOKEN // RUN))
        self._links: OrderedDict[int, None] = OrderedDict()

    def learn(self, chain: Sequence[int]) -> None:
        for link in reversed(chain[: self._most]):
            self._links[link] = None
            self._links.move_to_end(link)
        while len(self._links) > self._most:
            self._links.popitem(last=False)

    def links(self) -> list[int]:
        return list(self._links)

    def n_known(self, chain: Sequence[int]) -> int:
        return n_known(chain, self._links)
