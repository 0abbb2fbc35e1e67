"""Holds routing by prefix against routing at random, over replicas that run on Ray Serve.

    python scripts/check_routing.py MODEL [--replicas 4] [--prefixes 40] [--rounds 5] [--streams 8]

Every prefix begins one request of each round, and a replica's cache has room for a quarter of them.
Prints the share of prompt tokens that came from a cache, and how many requests the busiest replica
had, over the mean. Replicas share this machine's cores, however few. Needs `martlet[ray]`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import httpx
from martlet.runtime.model import load_model
from martlet.scripts.console import byte_progress
from martlet.scripts.deploy_ray import APP, NEWS_S, application, imported
from martlet.scripts.models import find_model

PREFIX_WORDS = 300
WORDS = ("bird", "sees", "small", "house", "near", "water", "sings", "old", "winds", "there")
OUTPUT = 8
CONTEXT = 1024
HOST, PORT = "127.0.0.1", 8765


class Found(NamedTuple):
    cached_share: float
    imbalance: float
    """Requests of the busiest replica, over the mean."""


async def measure(prompts: Sequence[Sequence[str]], n_streams: int, n_replicas: int) -> Found:
    """prompts: of each round, in which any n_streams are asked at a time."""
    n_cached = n_tokens = 0
    served: Counter[str] = Counter()
    url = f"http://{HOST}:{PORT}/v1/completions"
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        gate = asyncio.Semaphore(n_streams)

        async def ask(prompt: str) -> None:
            nonlocal n_cached, n_tokens
            body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
            async with gate:
                answer = await client.post(url, json=body)
            usage = answer.raise_for_status().json()["usage"]
            n_cached += usage["prompt_tokens_details"]["cached_tokens"]
            n_tokens += usage["prompt_tokens"]
            served[answer.headers["x-martlet-replica"]] += 1

        for each in prompts:
            await asyncio.gather(*(ask(prompt) for prompt in each))
            await asyncio.sleep(NEWS_S)
    return Found(n_cached / n_tokens, max(served.values()) * n_replicas / served.total())


def rounds_of(n_prefixes: int, n_rounds: int) -> list[list[str]]:
    draw = random.Random(0)
    prefixes = [
        f"{n}. " + " ".join(draw.choice(WORDS) for _ in range(PREFIX_WORDS))
        for n in range(n_prefixes)
    ]
    return [
        [f"{prefix} {nth}" for prefix in draw.sample(prefixes, n_prefixes)]
        for nth in range(n_rounds)
    ]


def room_for(path: str, prompts: Sequence[str], share: float) -> int:
    """Bytes of a cache that holds so many of these prompts, and one context beside them."""
    model = load_model(path, context=CONTEXT, kv_bytes=None)
    try:
        tokens = (
            sum(
                len(model.tokenizer.encode(prompt, add_special=True, parse_special=False))
                for prompt in prompts
            )
            * share
            + CONTEXT
        )
        return int(tokens * sum(model.plan.kv_group_bytes(model.kv_type)))
    finally:
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    for name, default in (("replicas", 4), ("prefixes", 40), ("rounds", 5), ("streams", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with byte_progress() as progress:
        path = str(find_model(args.model, progress=progress))
    prompts = rounds_of(args.prefixes, args.rounds)
    load = {
        "executor": "auto",
        "threads": 1,
        "context": CONTEXT,
        "kv_bytes": room_for(path, prompts[0], 1 / 4),
        "share_weights": True,
    }
    ray, serve = imported()
    ray.init(num_cpus=args.replicas, logging_level="error", log_to_driver=False)
    serve.start(http_options={"host": HOST, "port": PORT})
    for policy in ("random", "prefix"):
        bound = application(
            (path, "model", load, {"max_queue": 64}),
            replicas=(args.replicas, None, 1),
            threads=1,
            policy=policy,
            max_body=1 << 20,
        )
        serve.run(bound, name=APP, route_prefix="/")
        found = asyncio.run(measure(prompts, args.streams, args.replicas))
        print(
            f"{policy}: {found.cached_share:.1%} of prompt tokens cached, the busiest replica had "
            f"{found.imbalance:.2f} times the mean",
            flush=True,
        )
        serve.delete(APP)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
