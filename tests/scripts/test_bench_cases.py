"""Which steps a case runs, where their keys and values lie, and the order of measurements."""

import numpy as np
import pytest
from martlet.quant.errors import MartletError
from martlet.runtime.work import Speed, Work
from martlet.scripts.bench_cases import Bench, Case, Room, make_cases
from martlet.scripts.bench_measure import (
    Figure,
    Limits,
    Result,
    in_turn,
    measure,
    share_of_limit,
)

from ..runtime.tiny import tiny_model
from .bench_fakes import CountingExecutor


def bench_for(*cases: Case, max_rows: int = 8) -> tuple[Bench, CountingExecutor]:
    executor = CountingExecutor(max_rows=max_rows)
    return Bench(executor, Room.of(cases), 300), executor


def test_all_combinations_once_and_one_sequence_always() -> None:
    cases = make_cases(512, 64, [4, 2, 4], [2048, 0])
    assert [case.label for case in cases] == [
        "prefill 512",
        "decode 64",
        "decode 64 x 2",
        "decode 64 x 4",
        "prefill 512 @ 2048",
        "decode 64 @ 2048",
        "decode 64 x 2 @ 2048",
        "decode 64 x 4 @ 2048",
    ]


def test_nothing_to_measure_is_refused() -> None:
    assert make_cases(0, 1, [1], [0]) == [Case("decode", 1)]
    with pytest.raises(MartletError, match="--prefill and --decode"):
        make_cases(0, 0, [1], [0])


def test_a_prefill_is_cut_into_steps_and_only_its_last_row_wants_logits() -> None:
    bench, _ = bench_for(case := Case("prefill", 19, depth=5))
    steps = list(bench.steps(case))
    assert [step.n_rows for step in steps] == [8, 8, 3]
    assert np.concatenate([step.positions for step in steps]).tolist() == list(range(5, 24))
    assert [step.out_rows.tolist() for step in steps] == [[], [], [2]]
    assert len({id(step.block_table.base) for step in steps}) == 1


def test_a_decode_has_one_row_per_sequence_in_blocks_of_its_own() -> None:
    bench, executor = bench_for(case := Case("decode", 2, depth=9, n_seqs=3))
    first, second = bench.steps(case)
    assert first.positions.tolist() == [9, 9, 9]
    assert second.positions.tolist() == [10, 10, 10]
    assert first.seq_start.tolist() == [0, 1, 2, 3]
    assert first.out_rows.tolist() == [0, 1, 2]
    assert len(np.unique(first.block_table)) == first.block_table.size == 3 * 3
    assert first.block_table.max() < executor.n_blocks


def test_more_sequences_than_rows_are_refused() -> None:
    bench, _ = bench_for(case := Case("decode", 1, n_seqs=9))
    with pytest.raises(MartletError, match="9 sequences exceed 8 rows"):
        next(bench.steps(case))


def test_the_same_tokens_in_every_repeat() -> None:
    bench, executor = bench_for(case := Case("prefill", 8))
    bench.run(case)
    bench.run(case)
    assert (executor.ran[0].tokens == executor.ran[1].tokens).all()


def test_warm_up_fills_every_sequence_to_the_depth() -> None:
    cases = [Case("decode", 3, depth=10, n_seqs=2), Case("prefill", 4)]
    bench, executor = bench_for(*cases)
    bench.warm_up(cases)
    filled = [step for step in executor.ran if step.n_seqs == 1 and step.positions[0] < 10][:2]
    assert np.concatenate([step.positions for step in filled]).tolist() == list(range(10))
    tables = next(bench.steps(cases[0])).block_table
    assert executor.copied == list(zip(tables[0, :3], tables[1, :3], strict=True))


def test_every_repeat_measures_each_case_once_forth_and_back() -> None:
    cases = [Case("decode", 1), Case("decode", 1, n_seqs=2)]
    bench, _ = bench_for(*cases)
    told: list[str] = []
    results = measure(bench, tiny_model().plan(), cases, Limits(None, 0), 3, told.append)
    labels = [text.split(" ", 1)[1] for text in told if "/" in text]
    a, b = (case.label for case in cases)
    assert labels == [a, b, b, a, a, b]
    assert [len(result.seconds.samples) for result in results] == [3, 3]
    assert all(result.share(None) is None for result in results)
    assert in_turn(cases, 1) == cases[::-1]


def test_rates_come_from_the_median() -> None:
    work = Work(int8_macs=600, weight_bytes=80, kv_bytes=40)
    result = Result(Case("decode", 6, n_seqs=2), Figure((3.0, 1.0, 2.0)), work)
    assert result.tokens_per_s.median == 6
    assert (result.tokens_per_s.low, result.tokens_per_s.high) == (4, 12)
    assert (result.macs_per_s, result.bytes_per_s) == (300, 60)


@pytest.mark.parametrize(("n_bytes", "binds"), [(10.0, "memory"), (1000.0, "multiply")])
def test_the_share_names_what_binds(n_bytes: float, binds: str) -> None:
    share = share_of_limit(Work(int8_macs=100, weight_bytes=50), 10.0, Speed(100, 1, n_bytes))
    assert share is not None
    assert share.binds == binds
    assert share.of_limit == pytest.approx({"memory": 0.5, "multiply": 0.1}[binds])
