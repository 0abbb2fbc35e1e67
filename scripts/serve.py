"""`martlet serve`: a model behind the local HTTP API, and a line to try it with."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from martlet.scripts.cli import main

    main(["serve", *sys.argv[1:]])
