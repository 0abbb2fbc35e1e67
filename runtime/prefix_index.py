"""Which blocks hold which prefixes, and why a prefix is not among them.

Owns: keys (a hash chain over full blocks), the index, the memory of what was evicted. Must not
know: references, free blocks, requests.

A key is a hint: content and parent are compared on every hit, so a collision of hashes costs a
miss and never an answer.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
HashBlock = Callable[[bytes, bytes], bytes]

MOST_SIBLINGS = 64
"""Known blocks behind one prefix that are looked at for a common start: the newest ones."""

MissReason: TypeAlias = Literal[
    "off",
    "bypassed",
    "too_short",
    "evicted",
    "no_state",
    "salt",
    "collision",
    "fingerprint",
    "differs",
    "new",
]
MISS_REASONS: dict[MissReason, str] = {
    "off": "prefix reuse is switched off",
    "bypassed": "the request asked for all rows to be computed",
    "too_short": "the prompt has no full block before its last token",
    "evicted": "the block was known and has given way to others",
    "no_state": "the block is known, but not the state of recurrent layers behind it",
    "salt": "the block is known under another salt",
    "collision": "another block with the same hash is known",
    "fingerprint": "the folder keeps the first block of another model, cache type or build",
    "differs": "known sequences go on with other tokens here",
    "new": "no known sequence reaches beyond this place",
}


class Miss(NamedTuple):
    """Why a prefix hit ended before the last token, and at which token."""

    reason: MissReason
    at_token: int


class Key(NamedTuple):
    """Of one full block, in the chain of all blocks before it."""

    digest: bytes
    content: bytes
    """Its own token ids (block_tokens int32), and the salt in front of the first block's."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A registered block: the end of one exact token sequence from position 0."""

    digest: bytes
    parent: Prefix | None
    content: bytes
    block: int


def blake2b_chain(parent: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=parent, digest_size=32, person=b"martlet-kv").digest()


class PrefixIndex:
    """Prefixes by digest."""

    def __init__(
        self, block_tokens: int, fingerprint: bytes, hash_block: HashBlock, n_remembered: int
    ) -> None:
        """n_remembered: evicted blocks that can still be told from blocks never seen."""
        self.block_tokens = block_tokens
        self._root = hashlib.blake2b(fingerprint, digest_size=32).digest()
        self._hash_block = hash_block
        self._known: dict[bytes, Prefix] = {}
        self._children: dict[Prefix | bytes, dict[Prefix, None]] = {}  # the oldest first
        self._first_blocks: Counter[bytes] = Counter()  # without their salts
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._n_remembered = n_remembered

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._known.values())

    def key(self, keys: list[Key], salt: bytes, tokens: TokenIds, place: int) -> Key:
        """Of block `place`; `keys` are those of the same sequence found before, and is extended."""
        for at in range(len(keys), place + 1):
            start = at * self.block_tokens
            own = np.asarray(tokens[start : start + self.block_tokens], "<i4").tobytes()
            content = salt + own if at == 0 else own
            parent = keys[at - 1].digest if at else self._root
            keys.append(Key(self._hash_block(parent, content), content))
        return keys[place]

    def find(self, key: Key, parent: Prefix | None) -> Prefix | None:
        """The same tokens behind the same parent. The parent is compared by identity, being
        compared itself already, so all tokens before are equal too."""
        known = self._known.get(key.digest)
        is_same = known and known.parent is parent and known.content == key.content
        return known if is_same else None

    def has_digest(self, key: Key) -> bool:
        return key.digest in self._known

    def add(self, prefix: Prefix) -> None:
        self._known[prefix.digest] = prefix
        self._children.setdefault(self._branch(prefix), {})[prefix] = None
        self._evicted.pop(prefix.digest, None)
        if prefix.parent is None:
            self._first_blocks[self._unsalted(prefix.content)] += 1

    def evict(self, prefix: Prefix) -> None:
        del self._known[prefix.digest]
        siblings = self._children[self._branch(prefix)]
        del siblings[prefix]
        if not siblings:  # an empty entry would keep an evicted prefix alive
            del self._children[self._branch(prefix)]
        if prefix.parent is None:
            self._forget_first(self._unsalted(prefix.content))
        self._evicted[prefix.digest] = None
        if len(self._evicted) > self._n_remembered:
            self._evicted.popitem(last=False)

    def why_missing(self, key: Key, parent: Prefix | None) -> MissReason:
        """For a key that `find` does not find. "salt" is for the operator alone: shown to a client
        it would tell what others have asked, which salts are there to hide."""
        if key.digest in self._known:
            return "collision"
        if key.digest in self._evicted:
            return "evicted"
        if parent is None and self._first_blocks[self._unsalted(key.content)]:
            return "salt"
        branch = self._salt(key.content) if parent is None else parent
        return "differs" if branch in self._children else "new"

    def longest_run(
        self,
        parent: Prefix | None,
        salt: bytes,
        tokens: TokenIds,
        is_there: Callable[[Prefix], bool],
    ) -> tuple[Prefix, int] | None:
        """The known block behind `parent` that begins with most of the tokens, and with how many.

        tokens: 1 … block_tokens of them. None if no block begins with the first one. Blocks that
        are not there are passed over; of more than MOST_SIBLINGS only the newest are compared.
        """
        siblings = self._children.get(salt if parent is None else parent, {})
        newest = [p for p in islice(reversed(siblings), MOST_SIBLINGS) if is_there(p)]
        if not newest:
            return None
        joined = b"".join(self._unsalted(prefix.content) for prefix in newest)
        known = np.frombuffer(joined, "<i4").reshape(len(newest), self.block_tokens)
        runs = np.logical_and.accumulate(known[:, : len(tokens)] == tokens, axis=1).sum(axis=1)
        best = int(runs.argmax())
        return (newest[best], int(runs[best])) if runs[best] else None

    def check(self) -> None:
        """Asserts that every prefix is found by its digest and stands on a known parent."""
        for digest, prefix in self._known.items():
            assert prefix.digest == digest
            parent = prefix.parent
            assert parent is None or self._known.get(parent.digest) is parent, "orphaned prefix"
            assert prefix in self._children[self._branch(prefix)]
        n_children = sum(map(len, self._children.values()))
        assert n_children == len(self._known), "a child that nobody knows any more"
        assert all(self._children.values())
        assert not self._known.keys() & self._evicted.keys()

    def _branch(self, prefix: Prefix) -> Prefix | bytes:
        """What it stands on: another prefix, or the salt of its sequence."""
        return self._salt(prefix.content) if prefix.parent is None else prefix.parent

    def _salt(self, first_content: bytes) -> bytes:
        return first_content[: -4 * self.block_tokens]

    def _unsalted(self, content: bytes) -> bytes:
        return content[-4 * self.block_tokens :]

    def _forget_first(self, tokens: bytes) -> None:
        self._first_blocks[tokens] -= 1
        if not self._first_blocks[tokens]:
            del self._first_blocks[tokens]
