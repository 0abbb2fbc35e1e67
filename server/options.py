"""What the person who starts the server may choose.

Owns: ServerOptions and which Host names a bind address answers to. Must not know: the engine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from .bridge import Patience
from .spans import Spans

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY = "*"
ADDRESSES = "addresses"
"""Among hosts: any IP address, which no page from elsewhere has for its own name."""
Log: TypeAlias = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ServerOptions:
    """Defaults suit one person on one machine: loopback only, no key, no browser from elsewhere."""

    api_keys: tuple[str, ...] = ()
    """Any of these opens every route but /health, /ready and the page; none: no key is asked."""
    origins: tuple[str, ...] = ()
    """Web origins that may call from a browser, e.g. http://localhost:3000; "*" for all."""
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Host names that requests may carry, without port; ADDRESSES for those that are none, "*" for
    all."""
    model_aliases: tuple[str, ...] = ()
    """Further names the model answers to."""
    strict_fields: bool = False
    """Refuse unknown request fields instead of naming them in a header."""
    max_body_bytes: int = 16 << 20
    body_s: float = 30.0
    """A request's body must have arrived by then."""
    head_s: float = 30.0
    """From a connection, or from the first byte after an answer, to the end of a request's head."""
    max_request_s: float | None = None
    """No request may take longer, whatever deadline it brings."""
    max_per_client: int = 0
    """Requests of one key, or one address, at a time; 0: any number."""
    grace_s: float = 1.0
    """How long a stream waits for its first event before it commits to status 200."""
    ping_s: float = 15.0
    """Between keep-alive comments while a stream is silent; 0 sends none."""
    stall_s: float = 300.0
    """After this long without any movement the engine is taken for dead."""
    max_unread: int = 4096
    """Events that may wait for a client that does not read; with more its request is ended."""
    drain_s: float = 30.0
    """Running answers may take this long to finish once the server is told to stop."""
    log: Log | None = None
    """Takes a record of each request."""
    log_prompts: bool = False
    """Bodies of requests go into those records too."""
    vllm_names: bool = False
    """Figures of /metrics stand there under vLLM's names, too."""
    spans: Spans | None = None
    """Takes the phases of each generating request."""

    @property
    def patience(self) -> Patience:
        return Patience(ping_s=self.ping_s, stall_s=self.stall_s)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
