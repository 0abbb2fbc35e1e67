"""Prometheus metrics of one app, in a registry of its own.

Owns: names, HELP texts, buckets. Must not know: HTTP, how times are taken: they come from the
engine's own stamps (runtime.latency.Timings), counts from its stats.

Latencies are those of requests that ended by "stop" or "length"; cancelled and failed ones only
count in martlet_requests_total. A request without a second token has no time per output token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..runtime.aggregates import percentile
from ..runtime.events import Event, FinishEvent, TokenEvent
from ..runtime.latency import DEFINITIONS, Timings
from ..runtime.stats import EngineStats
from .vllm_names import VllmNames

NS_PER_S = 1e9
MS_PER_S = 1e3
RECENT = 256
"""Finished requests whose own figures are kept, for percentiles as of now."""
PERCENTS = (50, 95, 99)
GAPS_AT_ONCE = 64
"""Gaps of a request are counted in lots: one at a time, each would fetch the code anew."""

# Upper bounds other servers use, so that dashboards carry over, and finer ones for small machines.
# fmt: off
PHASE_BUCKETS = (
    .001, .0025, .005, .01, .025, .05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40,
    50, 60, 120, 240, 480, 960, 1920, 7680,
)
TTFT_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)
TOKEN_BUCKETS = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 1.25, 1.5, 1.75, 2,
    2.5, 5, 7.5, 10, 20, 40, 80,
)
# fmt: on

# name, buckets, the figure of runtime.latency it shows of each finished request that has one
HISTOGRAMS: tuple[tuple[str, tuple[float, ...], str], ...] = (
    ("martlet_request_queue_seconds", PHASE_BUCKETS, "queue_ms"),
    ("martlet_request_prefill_seconds", PHASE_BUCKETS, "prefill_ms"),
    ("martlet_request_decode_seconds", PHASE_BUCKETS, "decode_ms"),
    ("martlet_time_to_first_token_seconds", TTFT_BUCKETS, "ttft_ms"),
    ("martlet_request_time_per_output_token_seconds", TOKEN_BUCKETS, "tpot_ms"),
    (
        "martlet_request_amortised_time_per_output_token_seconds",
        TOKEN_BUCKETS,
        "amortised_tpot_ms",
    ),
    ("martlet_e2e_request_latency_seconds", PHASE_BUCKETS, "end_to_end_ms"),
)

# name, help, value
GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("martlet_requests_running", "Requests with a place in the batch.", lambda s: s.running),
    ("martlet_requests_waiting", "Requests accepted and not running.", lambda s: s.waiting),
    ("martlet_kv_blocks", "Blocks in the KV pool.", lambda s: s.blocks_total),
    ("martlet_kv_blocks_used", "Blocks held by running requests.", lambda s: s.blocks_used),
    ("martlet_kv_blocks_cached", "Free blocks with a known prefix.", lambda s: s.blocks_cached),
    (
        "martlet_kv_blocks_shared",
        "Blocks held by more than one running request.",
        lambda s: s.blocks_shared,
    ),
    (
        "martlet_kv_window_blocks",
        "Blocks of layers with a window; 0: they keep as many as the others.",
        lambda s: s.window_blocks_total,
    ),
    (
        "martlet_kv_window_blocks_used",
        "Blocks that the windows of running requests cover.",
        lambda s: s.window_blocks_used,
    ),
    (
        "martlet_kv_fragmentation",
        "Slots of held blocks / tokens in them: 1 is no waste.",
        lambda s: s.fragmentation,
    ),
)

# name, help, further labels, their values with their counts
Labels = tuple[str, ...]
COUNTERS: tuple[tuple[str, str, Labels, Callable[[EngineStats], Mapping[Labels, float]]], ...] = (
    (
        "martlet_prompt_tokens",
        "Prompt tokens, by where their keys and values came from.",
        ("source",),
        lambda s: {("computed",): s.tokens_prefilled, ("cached",): s.tokens_cached},
    ),
    (
        "martlet_generation_tokens",
        "Output tokens drawn, end-of-generation tokens included.",
        (),
        lambda s: {(): s.tokens_decoded},
    ),
    (
        "martlet_draft_tokens",
        "Guessed tokens that were checked, by who guessed and whether they were drawn.",
        ("source", "outcome"),
        lambda s: {
            (source, outcome): n
            for source, counts in s.drafts.items()
            for outcome, n in (
                ("accepted", counts.accepted),
                ("rejected", counts.drafted - counts.accepted),
            )
        },
    ),
    (
        "martlet_drafts",
        "Guesses that were checked, by who guessed and how many of their tokens were drawn.",
        ("source", "accepted"),
        lambda s: {(source, str(n)): count for (source, n), count in s.draft_lengths.items()},
    ),
    (
        "martlet_draft_seconds",
        "Time that rows of guesses have taken: calculated from the measured costs of steps.",
        (),
        lambda s: {(): s.draft_seconds},
    ),
    (
        "martlet_recomputed_tokens",
        "Rows computed again after a preemption.",
        (),
        lambda s: {(): s.tokens_recomputed},
    ),
    (
        "martlet_requests",
        "Requests the engine finished, by reason.",
        ("reason",),
        lambda s: {(reason,): count for reason, count in s.finished.items()},
    ),
    (
        "martlet_prefix_misses",
        "Requests whose prefix hit ended before their last token, by why it did.",
        ("reason",),
        lambda s: {(reason,): count for reason, count in s.prefix_misses.items()},
    ),
    (
        "martlet_grammar_masks",
        "Tokens drawn under a grammar.",
        (),
        lambda s: {(): s.masks},
    ),
    (
        "martlet_grammar_mask_seconds",
        "Time spent learning which tokens grammars allow; part of no request's own figures.",
        (),
        lambda s: {(): s.mask_seconds},
    ),
    ("martlet_steps", "Steps computed.", (), lambda s: {(): s.steps}),
    (
        "martlet_rows",
        "Rows of all steps: tokens of prompts, outputs and guesses, repeated ones included.",
        (),
        lambda s: {(): s.rows},
    ),
    ("martlet_preemptions", "Requests put back to wait.", (), lambda s: {(): s.preemptions}),
)


def meaning(figure: str) -> str:
    return DEFINITIONS[figure].meaning


class EngineCollector(Collector):
    """Reads the engine's stats when scraped; keeps nothing."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value(stats))
            yield gauge
        for name, text, labels, values in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name", *labels])
            for key, count in values(stats).items():
                counter.add_metric([self._model_name, *key], count)
            yield counter

    def describe(self) -> Iterable[Metric]:
        return ()


class Metrics:
    """What one app measures. `watch` makes the observer of one HTTP request."""

    def __init__(
        self, stats: Callable[[], EngineStats], model_name: str, *, vllm_names: bool = False
    ) -> None:
        """vllm_names: also under those (vllm_names.py)."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats, model_name))
        self._model_name = model_name
        labels = ("model_name", "stream")
        self._histograms = [
            (Histogram(name, meaning(of), labels, buckets=buckets, registry=self.registry), of)
            for name, buckets, of in HISTOGRAMS
        ]
        self._inter_token = Histogram(
            "martlet_inter_token_latency_seconds",
            meaning("itl_ms"),
            labels,
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        if vllm_names:
            histograms = [self._inter_token, *(histogram for histogram, _ in self._histograms)]
            self.registry.register(VllmNames(stats, histograms, model_name))
        self._recent: deque[Timings] = deque(maxlen=RECENT)
        self._answers = Counter(
            "martlet_http_responses",
            "HTTP answers by route and status.",
            ("model_name", "route", "status"),
            registry=self.registry,
        )

    def watch(self, is_stream: bool) -> Callable[[int, Event], None]:
        labels: tuple[Any, ...] = (self._model_name, str(is_stream).lower())
        inter_token = self._inter_token.labels(*labels)
        times_ns: dict[int, list[int]] = {}

        def count_gaps(times: list[int]) -> None:
            for before, after in pairwise(times):
                inter_token.observe((after - before) / NS_PER_S)
            del times[:-1]

        def observe(index: int, event: Event) -> None:
            times = times_ns.setdefault(index, [])
            if isinstance(event, TokenEvent):
                times.append(event.time_ns)
                if len(times) > GAPS_AT_ONCE:
                    count_gaps(times)
                return
            count_gaps(times)
            if isinstance(event, FinishEvent) and event.reason in ("stop", "length"):
                self._recent.append(event.timings)
                for histogram, figure in self._histograms:
                    ms = getattr(event.timings, figure)
                    if ms is not None:
                        histogram.labels(*labels).observe(ms / MS_PER_S)

        return observe

    def recent_latencies(self) -> dict[str, Any]:
        """Percentiles over the last requests that ended well; null where none has such a time."""
        ends = tuple(self._recent)
        ttft = [end.ttft_ms for end in ends if end.ttft_ms is not None]
        tpot = [end.tpot_ms for end in ends if end.tpot_ms is not None]
        return {"n": len(ends), "ttft_ms": _percentiles(ttft), "tpot_ms": _percentiles(tpot)}

    def count_answer(self, route: str, status: int) -> None:
        self._answers.labels(self._model_name, route, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
