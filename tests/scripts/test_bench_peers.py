"""Alternation with llama.cpp's programs, played by scripts whose speed is known."""

import json
import os
import time
from pathlib import Path

import pytest
from martlet.scripts import bench_peers as peers_command
from martlet.scripts.bench_cases import Bench, Case, Room, make_cases
from martlet.scripts.bench_peers import MARTLET, Alternation, alternate, busy_programs
from martlet.scripts.bench_peers_report import quotient
from martlet.scripts.peer_llama import LlamaCpp, LlamaPrograms, PeerFailed

from .bench_fakes import HAS_PROGRAMS, CountingExecutor, fake_llama, write_programs
from .conftest import Martlet

pytestmark = pytest.mark.skipif(not HAS_PROGRAMS, reason="the fake programs are #! scripts")
SMALL = ("--prefill", "8", "--decode", "2", "--depth", "0,4", "--repeat", "2", "--read-mb", "64")


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    return LlamaCpp(LlamaPrograms.find(fake_llama(tmp_path)), Path("m.gguf"), 2)


def test_figures_by_case(llama: LlamaCpp) -> None:
    cases = make_cases(8, 2, [1, 3], [0, 4])
    found = llama.tokens_per_s(cases)
    assert found == {
        Case("prefill", 8): 200.0,
        Case("decode", 2): 20.0,
        Case("decode", 2, n_seqs=3): 60.0,
        Case("prefill", 8, depth=4): 40.0,
        Case("decode", 2, depth=4): 4.0,
        Case("decode", 2, depth=4, n_seqs=3): 15.0,
    }
    assert llama.build == "build 7 (abc)"


def test_arguments_say_threads_flash_and_one_repetition(tmp_path: Path) -> None:
    source = "import json, sys; print(json.dumps([{'n_prompt': 8, 'n_gen': 0, 'avg_ts': 1.0,"
    source += " 'build_number': ' '.join(sys.argv[1:])}]))"
    programs = LlamaPrograms.find(write_programs(tmp_path, llama_bench=source))
    peer = LlamaCpp(programs, Path("m.gguf"), 3, flash=False)
    peer.tokens_per_s([Case("prefill", 8)])
    assert "-m m.gguf -t 3 -fa 0 -d 0 -p 8 -n 0 -r 1 -o json" in peer.build


def test_several_sequences_are_left_out_without_their_program(tmp_path: Path) -> None:
    fake_llama(tmp_path)
    (tmp_path / "llama-batched-bench").unlink()
    peer = LlamaCpp(LlamaPrograms.find(tmp_path), Path("m.gguf"), 1)
    several = Case("decode", 2, n_seqs=2)
    assert not peer.can_run(several)
    assert peer.tokens_per_s([Case("decode", 2), several]) == {Case("decode", 2): 20.0}


def test_a_missing_or_failing_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="--llama-bin"):
        LlamaPrograms.find(tmp_path)
    source = "import sys; print('loading', file=sys.stderr); sys.exit('no such model')"
    programs = LlamaPrograms.find(write_programs(tmp_path, llama_bench=source))
    with pytest.raises(PeerFailed, match="ended with 1: no such model"):
        LlamaCpp(programs, Path("m.gguf"), 1).tokens_per_s([Case("decode", 1)])
    programs = LlamaPrograms.find(write_programs(tmp_path, llama_bench="print('| a table |')"))
    with pytest.raises(PeerFailed, match="no JSON"):
        LlamaCpp(programs, Path("m.gguf"), 1).tokens_per_s([Case("decode", 1)])


def test_sides_take_turns_in_going_first(llama: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_command, "SETTLE_SECONDS", 0.0)
    case = Case("decode", 2)
    bench = Bench(CountingExecutor(), Room.of([case]), 10)
    told: list[str] = []
    sampled: list[int] = []
    found = alternate(bench, [llama], [case], [0, 1], 2, lambda: sampled.append(1), told.append)
    peer = llama.name
    assert [text for text in told if "/" in text] == [
        f"1/2 {MARTLET}, 0 busy",
        f"1/2 {peer}, 0 busy",
        f"1/2 {MARTLET}, 1 busy",
        f"1/2 {peer}, 1 busy",
        f"2/2 {peer}, 0 busy",
        f"2/2 {MARTLET}, 0 busy",
        f"2/2 {peer}, 1 busy",
        f"2/2 {MARTLET}, 1 busy",
    ]
    assert len(sampled) == 4  # before and after every turn
    assert found.of(peer, 1, case) == [20.0, 20.0]
    assert len(found.of(MARTLET, 0, case)) == 2


def test_ratios_are_taken_turn_by_turn() -> None:
    found = Alternation()
    case = Case("decode", 1)
    for ours, theirs in ((10.0, 5.0), (30.0, 10.0), (8.0, 8.0)):
        found.add(MARTLET, 0, {case: ours})
        found.add("peer", 0, {case: theirs})
    ratio = quotient(found.of(MARTLET, 0, case), found.of("peer", 0, case))
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert quotient(found.of(MARTLET, 0, case), []) is None


def test_busy_programs_burn_time_and_end() -> None:
    before = os.times()
    with busy_programs(1):
        time.sleep(0.5)
    after = os.times()
    assert after.children_user - before.children_user > 0.05
    with busy_programs(0):
        pass


def test_the_command_prints_ratios_and_shares(
    martlet: Martlet, tiny_file: Path, tmp_path: Path
) -> None:
    arguments = ["bench-peers", str(tiny_file), *SMALL, "--batch", "1,2", "--busy", "1"]
    arguments += ["--llama-bin", str(fake_llama(tmp_path)), "--executor", "reference"]
    told = martlet(*arguments)
    assert told.returncode == 0, told.stderr
    assert "llama.cpp fa=1: build 7 (abc)" in told.stdout
    assert "beside 1 busy programs (fair share" in told.stdout
    done = martlet(*arguments, "--json")
    report = json.loads(done.stdout)
    case = report["cases"][0]
    ours, theirs = (case["sides"][side]["tokens_per_s"] for side in (MARTLET, "llama.cpp fa=1"))
    assert theirs["samples"] == [200.0, 200.0]
    expected = [a / 200.0 for a in ours["samples"]]
    assert case["ratios"]["llama.cpp fa=1"]["samples"] == pytest.approx(expected)
    busy = next(c for c in report["cases"] if c["busy_programs"] == 1)
    assert busy["sides"]["llama.cpp fa=1"]["of_quiet"]["median"] == pytest.approx(1.0)
    assert len(report["cases"]) == 2 * 6
