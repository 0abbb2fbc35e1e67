"""Ray Serve's request router: to the replica that knows most of a prompt, within bounded imbalance.

Owns: what one router knows of the replicas. Must not know: how a choice is made (routing.py), what
chains are made of. Needs Ray (extra `martlet[ray]`).
"""

from __future__ import annotations

from random import Random
from typing import Any

from martlet.scripts import routing
from martlet.scripts.prompt_chain import Digest, n_known
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

STATS = "prefixes"
"""What a replica's routing stats call the links of its digest."""
NEWS_TOKENS = 1 << 17
"""Room for what was sent to a replica and may not be in its own figures yet."""


class PrefixRouter(RequestRouter):
    def initialize_state(self, policy: str = "prefix", **_: Any) -> None:
        """policy: or `random`, for comparison."""
        self._policy = policy
        self._draw = Random()
        self._sent: dict[ReplicaID, Digest] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        candidates = list(candidate_replicas)
        if pending_request is None or not candidates:
            return [candidates]
        pending_request.routing_context.should_backoff = True
        self._draw.shuffle(candidates)
        if self._policy == "prefix":
            candidates.sort(key=self._unfinished)
            if chain := pending_request.args[0].chain:
                candidates.insert(0, candidates.pop(self._best(candidates, chain)))
        return [[each] for each in candidates]  # one after the other, as each refuses

    def _best(self, candidates: list[RunningReplica], chain: list[int]) -> int:
        return routing.by_prefix(
            [self._unfinished(each) for each in candidates],
            [self._known(each, chain) for each in candidates],
            [each.replica_id.unique_id.encode() for each in candidates],
            chain[0].to_bytes(8, "little"),
            self._draw,
        )

    def _unfinished(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _known(self, replica: RunningReplica, chain: list[int]) -> int:
        sent = self._sent.get(replica.replica_id)
        told = n_known(chain, (replica.routing_stats or {}).get(STATS, ()))
        return max(told, sent.n_known(chain) if sent else 0)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._sent.setdefault(replica_id, Digest(NEWS_TOKENS)).learn(pending_request.args[0].chain)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._sent.pop(replica_id, None)
