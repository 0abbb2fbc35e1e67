"""Who can reach a server, and with what key: checked before it opens its door.
Owns key files and the refusal to be open by mistake; knows nothing of models."""

from __future__ import annotations

import os
from pathlib import Path

from martlet.quant.errors import MartletError
from martlet.scripts.console import note


def read_keys(path: Path | None) -> tuple[str, ...]:
    """One per line; empty lines and those that begin with # are none."""
    if path is None:
        return ()
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise MartletError(f"{path} holds no key; write one per line")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        note(f"warning: others on this machine may read {path}; chmod 600 mends that")
    return keys


def check_exposure(host: str, *, has_key: bool, is_insecure: bool) -> None:
    from martlet.server.options import is_loopback

    if is_loopback(host) or has_key:
        return
    if not is_insecure:
        raise MartletError(
            f"{host} is open to the network and asks for no key; add --api-key or --api-key-file, "
            "or --insecure to let anybody in"
        )
    note(f"warning: {host} is open to the network and asks for no key (--insecure)")
