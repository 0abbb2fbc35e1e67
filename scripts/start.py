"""From a fresh checkout to a model that answers over HTTP, in one command.
`python3 scripts/start.py` serves until stopped; `--once "prompt"` answers one prompt and ends.
Before .venv exists this runs on a bare Python: standard library only above `enter`."""

from __future__ import annotations

import argparse
import sys

from catalogue import CATALOGUE, DEFAULT_MODEL  # type: ignore[import-not-found]
from environment import enter  # type: ignore[import-not-found]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Makes .venv, installs martlet into it, fetches a model and serves it.",
        epilog=f"Known models: {', '.join(CATALOGUE)}.",
    )
    parser.add_argument("--once", metavar="PROMPT", help="print the answer to PROMPT and exit")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a known name, hf:ORG/REPO/FILE.gguf or a path"
    )
    parser.add_argument("--port", type=int, default=8080, help="on 127.0.0.1 (default 8080)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer to --once")
    parser.add_argument("--executor", default="auto", help="auto, native, numba or reference")
    parser.add_argument("--threads", type=int, help="default: what suits this machine")
    parser.add_argument("--context", type=int, help="tokens a request may span")
    parser.add_argument("--kv-bytes", metavar="SIZE", help="memory for keys and values, as 2G")
    return parser.parse_args()


def serve_options(arguments: argparse.Namespace) -> list[str]:
    given = {"--executor": arguments.executor, "--threads": arguments.threads}
    given |= {"--context": arguments.context, "--kv-bytes": arguments.kv_bytes}
    return [word for name, value in given.items() if value for word in (name, str(value))]


def main() -> None:
    arguments = parse_arguments()
    enter(__file__, ())
    print("starting martlet", file=sys.stderr, flush=True)  # its imports take seconds at first
    options = serve_options(arguments)
    if arguments.once is None:
        from martlet.scripts.cli import main as martlet

        martlet(["serve", arguments.model, "--port", str(arguments.port), *options])
    else:
        from martlet.quant.errors import MartletError
        from martlet.scripts.once import answer_once

        try:
            answer_once(arguments.model, arguments.once, arguments.max_tokens, options)
        except MartletError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit("error: interrupted")


if __name__ == "__main__":
    main()
