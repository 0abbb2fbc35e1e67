"""Our figures once more under vLLM's names, for gateways and dashboards that know those alone.

Owns: which name of theirs means what of ours. Must not know: how figures come about. Off unless
asked for, as it says of this server what is not so. Names: vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..runtime.events import FinishReason
from ..runtime.stats import EngineStats

ENGINE = "0"
"""Theirs number the engines of a process; here there is one."""

# theirs: of ours
GAUGES: Mapping[str, Callable[[EngineStats], float]] = {
    "vllm:num_requests_running": lambda s: s.running,
    "vllm:num_requests_waiting": lambda s: s.waiting,
    # A share from 0 to 1, whatever it is called.
    "vllm:kv_cache_usage_perc": lambda s: s.blocks_used / s.blocks_total if s.blocks_total else 0.0,
}
COUNTERS: Mapping[str, Callable[[EngineStats], float]] = {
    "vllm:prompt_tokens": lambda s: s.tokens_prefilled + s.tokens_cached,
    "vllm:generation_tokens": lambda s: s.tokens_decoded,
    "vllm:prefix_cache_queries": lambda s: s.tokens_prefilled + s.tokens_cached,
    "vllm:prefix_cache_hits": lambda s: s.tokens_cached,
    "vllm:num_preemptions": lambda s: s.preemptions,
}
HISTOGRAMS: Mapping[str, str] = {
    "martlet_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "martlet_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "martlet_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "martlet_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "martlet_request_queue_seconds": "vllm:request_queue_time_seconds",
    "martlet_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "martlet_request_decode_seconds": "vllm:request_decode_time_seconds",
}
ENDED_WELL: tuple[FinishReason, ...] = ("stop", "length")
TOLD = "The figure of martlet that has this meaning; docs/serving.md tells which."


class VllmNames(Collector):
    """Beside the collectors that have the figures."""

    def __init__(
        self, stats: Callable[[], EngineStats], histograms: Sequence[Histogram], model_name: str
    ) -> None:
        self._stats, self._histograms, self._model_name = stats, histograms, model_name

    def collect(self) -> Iterator[Metric]:
        stats, labels = self._stats(), ["model_name", "engine"]
        values = [self._model_name, ENGINE]
        for name, value in GAUGES.items():
            gauge = GaugeMetricFamily(name, TOLD, labels=labels)
            gauge.add_metric(values, value(stats))
            yield gauge
        for name, value in COUNTERS.items():
            counter = CounterMetricFamily(name, TOLD, labels=labels)
            counter.add_metric(values, value(stats))
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success", TOLD, labels=[*labels, "finished_reason"]
        )
        for reason in ENDED_WELL:
            ends.add_metric([*values, reason], stats.finished.get(reason, 0))
        yield ends
        sizes = ["block_size", "num_gpu_blocks"]
        config = GaugeMetricFamily("vllm:cache_config_info", TOLD, labels=[*labels, *sizes])
        config.add_metric([*values, str(stats.block_tokens), str(stats.blocks_total)], 1)
        yield config
        for histogram in self._histograms:
            for family in histogram.collect():
                if family.name in HISTOGRAMS:
                    yield _renamed(family, HISTOGRAMS[family.name])

    def describe(self) -> Iterable[Metric]:
        return ()


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, TOLD, family.type)
    for sample in family.samples:
        ending = sample.name.removeprefix(family.name)
        renamed.add_sample(name + ending, {**sample.labels, "engine": ENGINE}, sample.value)
    return renamed
