"""`martlet top`: what a running server does, as it does it.
Owns the options and the loop; reading is top_sample.py's, layout top_view.py's."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from martlet.scripts.console import plain_console

if TYPE_CHECKING:
    from martlet.runtime.work import Speed
    from martlet.scripts.top_sample import Server


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of a server.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None, typer.Option(envvar="MARTLET_API_KEY", help="If the server asks for one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Which, where the server has several.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Two looks, lines of text, the end.")
    ] = False,
    int8: Annotated[
        float | None, typer.Option(min=0.001, help="GMAC/s of the server's machine.")
    ] = None,
    read: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s of the server's machine.")
    ] = None,
    f32: Annotated[
        float | None, typer.Option(min=0.001, help="GMAC/s of floats; a quarter of --int8.")
    ] = None,
) -> None:
    """Watch the server at URL: requests, rows per step, KV blocks, prefixes, latencies."""
    from martlet.scripts.top_sample import Server

    if (int8 is None) != (read is None):
        raise typer.BadParameter("--int8 and --read tell what binds only together.")
    speed = speed_of(int8, f32, read)
    server = Server(url if "://" in url else f"http://{url}", api_key, model)
    if once or not sys.stdout.isatty():
        show_once(server, every, speed)
    else:
        watch(server, every, speed)


def speed_of(int8: float | None, f32: float | None, read: float | None) -> Speed | None:
    from martlet.runtime.work import Speed

    if int8 is None or read is None:
        return None
    return Speed(int8 * 1e9, (f32 or int8 / 4) * 1e9, read * 1e9)


def show_once(server: Server, every: float, speed: Speed | None) -> None:
    from martlet.scripts.top_sample import Change
    from martlet.scripts.top_view import lines

    before = server.look()
    time.sleep(every)
    for line in lines(Change(before, server.look()), speed):
        print(line)


def watch(server: Server, every: float, speed: Speed | None) -> None:
    from martlet.scripts.top_sample import Change
    from martlet.scripts.top_view import view
    from rich.live import Live

    now = server.look()
    screen = Live(console=plain_console(), screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), screen as live:  # which is how one leaves
        while True:
            time.sleep(every)
            before, now = now, server.look()
            live.update(view(Change(before, now), speed), refresh=True)


if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["top", *sys.argv[1:]])
