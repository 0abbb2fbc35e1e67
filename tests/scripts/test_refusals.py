"""What scripts/refusals.py says of a full server, and when it says nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..server.scripted_engine import ScriptedEngine, says
from ..server.serving import serving

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "refusals.py"


def measure(slots: int, tokens: int, streams: int = 2) -> subprocess.CompletedProcess[str]:
    engine = ScriptedEngine(says("", end=False), slots=slots, max_queue=0, token_s=0.02)
    with serving(engine) as client:
        command = [sys.executable, str(SCRIPT), str(client.base_url), "--rate", "30"]
        command += ["--streams", str(streams), "--seconds", "0.5", "--tokens", str(tokens)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


def p50_ms(line: str, what: str) -> float:
    found = re.fullmatch(what + r": p50 ([\d.]+), p99 [\d.]+, worst [\d.]+ ms of \d+", line)
    assert found is not None, line
    return float(found[1])


def test_a_full_server_is_measured() -> None:
    done = measure(slots=2, tokens=4000)
    assert done.returncode == 0, done.stderr
    alone, beside, answers = done.stdout.splitlines()
    assert p50_ms(alone, "gaps alone") >= 10  # two streams of a token each 20 ms
    assert (
        p50_ms(beside, "gaps with 30 refusals a second") >= 10
    )  # two streams of a token each 20 ms
    found = re.fullmatch(r"answers \{503: (\d+)\}: p50 .* ms of (\d+)", answers)
    assert found is not None, answers
    assert found[1] == found[2] != "0"


@pytest.mark.parametrize(
    ("slots", "tokens", "said"), [(1, 4000, "a place for each"), (2, 30, "more --tokens")]
)
def test_what_was_no_full_server_gives_no_figures(slots: int, tokens: int, said: str) -> None:
    done = measure(slots, tokens)
    assert done.returncode == 1
    assert said in done.stderr
    assert "gaps" not in done.stdout
