"""How the command line speaks: one-line errors, progress bars, JSON, text safe for a terminal.
Owns exit codes and what goes to stderr; must not know what any command does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import typer
from martlet.quant.errors import MartletError
from typer.core import TyperGroup

EXIT_ERROR, EXIT_USAGE, EXIT_BUG, EXIT_INTERRUPTED = 1, 2, 70, 130
# By its relation to a public name, since typer carries click under varying names.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
# Bell, escape sequences and C1 codes could retitle or rewrite a terminal; newline and tab stay.
WIDE = 10_000  # columns
CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (9, 10)}


class OneLineErrors(TyperGroup):
    """A command group whose failures are one line on stderr and an exit code, unless debugging."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with one_line_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors(debug=bool(ctx.params.get("debug"))), unwound_by_signals():
            return super().invoke(ctx)


@contextlib.contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    try:
        yield
    except USAGE_ERROR as error:
        ctx = getattr(error, "ctx", None)
        command = ctx.command_path if ctx else "martlet"
        message = error.format_message()  # type: ignore[attr-defined]
        if not message:  # no command given: the help was shown instead
            raise typer.Exit(EXIT_USAGE) from None
        stop = "" if message.endswith((".", "?")) else "."
        fail(f"{message}{stop} See `{command} --help`.", EXIT_USAGE)
    except BrokenPipeError:  # the reader of our output went away, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if isinstance(error, (MartletError, OSError)):
            fail(told(error), EXIT_ERROR)
        if is_click_error(error):
            raise
        if isinstance(error, ModuleNotFoundError) and is_optional(error.name):
            wanted = error.name
            fail(f"this needs {wanted}, not installed; pip install {wanted}", EXIT_ERROR)
        name = type(error).__name__
        fail(f"{name}: {error} (a bug; MARTLET_DEBUG=1 shows where)", EXIT_BUG)


def told(error: Exception) -> str:
    """`[Errno 2] No such file or directory: 'x'` -> `x: No such file or directory`."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def is_optional(module: str | None) -> bool:
    """Some of what is required has no wheel for every system, and what runs without runs there."""
    return module in ("llguidance", "numba", "sentencepiece")


def is_click_error(error: Exception) -> bool:
    """Click's own signals, such as the one that shows help when no command is given."""
    return hasattr(error, "exit_code") and type(error).__module__.split(".")[0] in (
        "click",
        "typer",
    )


def fail(message: str, exit_code: int) -> None:
    line = " ".join(message.split())
    print(f"error: {line.translate(CONTROLS)}", file=sys.stderr)
    raise typer.Exit(exit_code)


def print_json(value: Any) -> None:
    print(json.dumps(without_nan(value), indent=2, ensure_ascii=False, allow_nan=False))


def without_nan(value: Any) -> Any:
    """What is not known (NaN) or has no bound is null: JSON has no other word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def write_text(text: str) -> None:
    """Model output as it comes; to a terminal without the characters that control it."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def plain_console() -> Any:
    """Prints tables and lines as they are; where they go to a file, tables are not folded."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Signalled(SystemExit):
    """Nobody but who sent it up the stack may catch it; event loops let a SystemExit pass."""


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal leave the block as an error does, so that a file begun goes
    away and a progress bar gives the cursor back; then they end the process as they would have.
    What is ignored stays so, and who has a way of his own with them keeps it."""
    if threading.current_thread() is not threading.main_thread():  # gets no signals
        yield
        return
    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    caught = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, _: Any) -> None:
        raise _Signalled(number)

    for number in caught:
        signal.signal(number, leave)
    ended_by = None
    try:
        yield
    except _Signalled as error:
        (ended_by,) = error.args
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
    if ended_by is not None:
        signal.raise_signal(ended_by)


@contextlib.contextmanager
def byte_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that appears with the first report and not before."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("", start=True)

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        bar.update(task, description=what, completed=done_bytes, total=total_bytes)
        bar.start()

    try:
        yield report
    finally:
        if bar.live.is_started:  # stopping a bar that never showed prints an empty line
            bar.stop()


@contextlib.contextmanager
def chunk_progress(what: str, n_chunks: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr: reports take the chunks done and a word on the result so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=n_chunks)
        yield lambda done, so_far: bar.update(
            task, completed=done, description=f"{what} {so_far}".rstrip()
        )


@contextlib.contextmanager
def stage_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for every stage of a work, with the time it took, or will still take:
    reports take the stage, and how many of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    left = Remaining(elapsed_when_finished=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), left
    with Progress(*columns, console=Console(stderr=True)) as bar:
        stages: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in stages:
                stages[what] = bar.add_task(what, total=total)
            bar.update(stages[what], completed=done)

        yield report
