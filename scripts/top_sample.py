"""One look at a running server: its /metrics and /stats, and what changed between two looks.
Owns reading them; must not know how they are shown."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from martlet.quant.errors import MartletError

TIMEOUT_S = 10.0
FINISHED = ("stop", "length", "cancelled", "deadline", "error")


class NoServer(MartletError):
    """Nobody answers there, or not as martlet does."""


@dataclass(frozen=True)
class Sample:
    """Counters by name and the values of their labels, if they have some: `requests.stop`."""

    time_s: float
    counts: Mapping[str, float]
    stats: Mapping[str, Any]

    def __getitem__(self, name: str) -> float:
        return self.counts.get(name, 0.0)

    def total(self, name: str, last_label: str) -> float:
        """Over all values of the labels before the last."""
        return sum(
            value
            for key, value in self.counts.items()
            if key.startswith(f"{name}.") and key.endswith(f".{last_label}")
        )


@dataclass(frozen=True)
class Change:
    """From one sample to a later one."""

    before: Sample
    now: Sample

    @property
    def seconds(self) -> float:
        return max(self.now.time_s - self.before.time_s, 1e-9)

    def of(self, name: str) -> float:
        """A server that was started anew counts from 0 again."""
        return max(0.0, self.now[name] - self.before[name])

    def per_s(self, name: str) -> float:
        return self.of(name) / self.seconds

    def ratio(self, name: str, of: str) -> float | None:
        return self.of(name) / self.of(of) if self.of(of) else None


@dataclass(frozen=True)
class Server:
    """url: as `http://127.0.0.1:8080`; model: which of several, None for the only one."""

    url: str
    key: str | None = None
    model: str | None = None

    def look(self) -> Sample:
        """Raises NoServer."""
        query = f"?model={quote(self.model)}" if self.model else ""
        try:
            stats = json.loads(self._get(f"/stats{query}"))
            counts = counts_of(self._get("/metrics"), stats["model"])
        except (ValueError, KeyError, TypeError) as error:
            raise NoServer(f"{self.url} does not answer as martlet does: {error!r}") from None
        return Sample(time.monotonic(), counts, stats)

    def _get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                text: str = answer.read().decode("utf-8", "replace")
                return text
        except urllib.error.HTTPError as error:
            hint = "; give its key with --api-key" if error.code == 401 else ""
            raise NoServer(f"{self.url}{path} answered {error.code}{hint}") from None
        except (OSError, ValueError) as error:
            raise NoServer(f"nobody answers at {self.url}: {error}") from None


def counts_of(text: str, model_name: str) -> dict[str, float]:
    """martlet's own gauges and counters of one model, without prefix and ending."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("martlet_") or family.type not in ("gauge", "counter"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = dict(sample.labels)
            if labels.pop("model_name", model_name) == model_name:
                name = ".".join([family.name.removeprefix("martlet_"), *labels.values()])
                found[name] = sample.value
    return found
