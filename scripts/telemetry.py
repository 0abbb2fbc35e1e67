"""Where OpenTelemetry spans go: to the collector that the usual variables name.
Owns the provider and its end; what is in a span is martlet.server.telemetry's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from martlet.scripts.errors import MissingExtra

if TYPE_CHECKING:
    from martlet.server.spans import Spans

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@contextlib.contextmanager
def open_spans(wanted: bool) -> Iterator[Spans | None]:
    """OTLP over HTTP; OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and the like apply. What is
    left to send is sent at the end. Raises MissingExtra."""
    if not wanted:
        yield None
        return
    check_installed()
    from martlet.server.telemetry import OtelSpans
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "martlet")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield OtelSpans(provider)
    finally:
        provider.shutdown()


def check_installed() -> None:
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of a parent
            found = None
        if found is None:
            raise MissingExtra(
                "--otel needs OpenTelemetry's SDK: `pip install 'martlet[otel]'` brings it; "
                "or leave --otel out"
            )
