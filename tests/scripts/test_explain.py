"""What binds a model: against counting by hand, and against records of the model itself."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.quant.gguf_file import GGUFFile
from martlet.runtime.ops import KvType
from martlet.runtime.plan import Plan
from martlet.runtime.work import Speed, kv_value_bytes, step_work
from martlet.scripts import explain_plot
from martlet.scripts.bench_cases import Bench, Case, Room
from martlet.scripts.errors import ComparisonError
from martlet.scripts.explain import knees_of, plan_of, put_together
from martlet.scripts.explain_model import (
    Guess,
    Subject,
    contexts,
    expected_tokens,
    guesses,
    steps_of,
    variants,
)
from martlet.scripts.explain_record import Measured, Record, crossings, read_record

from ..recorded import gguf_of
from ..runtime.tiny import TinyDims, tiny_model
from .bench_fakes import CountingExecutor
from .conftest import Martlet

SPEED = Speed(int8_macs=100e9, f32_macs=25e9, n_bytes=20e9)
GIVEN = ("--int8", "100", "--f32", "25", "--read", "20")
DIMS = TinyDims(dim=64, ffn_dim=128, heads=4, kv_heads=1, head_dim=16, vocab_size=100)
SMALL_BENCH = ("--executor", "reference", "--repeat", "2", "--read-mb", "64")


@functools.cache
def plan_named(name: str) -> Plan:
    with GGUFFile.open(gguf_of(name)) as file:
        return plan_of(file, 8)[0]


def subject_of(arch: str = "llama", speed: Speed = SPEED, **dims: int) -> Subject:
    model = tiny_model(arch, dims=TinyDims(**{**vars(DIMS), **dims}), formats=("Q8_0",))
    return Subject(model.plan(), KvType.F16, speed)


def test_steps_are_those_of_the_benchmark() -> None:
    subject = subject_of()
    cases = [Case("prefill", 100, 7), Case("decode", 3, 9, 4), Case("decode", 2)]
    executor = CountingExecutor(max_rows=subject.plan.max_rows)
    bench = Bench(executor, Room.of(cases), DIMS.vocab_size)
    for case in cases:
        mine = [step_work(subject.plan, step) for step in steps_of(case, subject.plan.max_rows)]
        assert mine == [step_work(subject.plan, step) for step in bench.steps(case)]


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "deepseek2", "gemma3", "qwen35"])
@settings(max_examples=5)
@given(intensity=st.floats(0.5, 200), context=st.integers(1, 300))
def test_the_crossover_is_the_first_batch_that_multiplying_binds(
    name: str, intensity: float, context: int
) -> None:
    """Dense, with experts, latent attention, windows and recurrent states."""
    speed = Speed(20e9 * intensity, 20e9 * intensity, 20e9)
    subject = Subject(plan_named(name), KvType.F16, speed)
    found = subject.crossover(context)
    first = next((n for n in range(1, 25) if subject.decode(context, n).binds == "multiply"), None)
    assert found == first or (first is None and (found is None or found > 24))


def test_experts_are_read_as_far_as_any_row_chose_them() -> None:
    """Of 5 experts a row meets 2; of many rows every expert has some."""
    one, many = (subject_of("qwen3moe").decode(1, n).work for n in (1, 1000))
    experts = 2 * 3 * 64 * 128 * 5 * 34 // 32  # layers, matrices of an expert, Q8_0
    assert many.weight_bytes - one.weight_bytes == pytest.approx(experts * 3 / 5, abs=10)
    assert many.int8_macs == 1000 * one.int8_macs


def test_latent_attention_reads_one_head_however_many_query_it() -> None:
    plan = plan_named("deepseek2")
    subject = Subject(plan, KvType.F16, SPEED)
    more = subject.decode(201).work.kv_bytes - subject.decode(1).work.kv_bytes
    assert more == 200 * plan.kv_bytes_per_token()
    assert all(layer.kv_heads == 1 and layer.v_dim == 0 for layer in plan.kv_layers)


def test_a_context_grows_by_its_keys_and_values_until_windows_are_full() -> None:
    rows = {each.n_tokens: each for each in contexts(subject_of("gemma3", n_layers=3), 1024)}
    assert list(rows) == [1, 512, 1024]
    layer = 2 * 16 * 2  # bytes of a position
    assert rows[1].kv_bytes == 3 * layer
    assert rows[512].kv_bytes == (20 + 512 + 20) * layer
    assert rows[1024].kv_bytes == (20 + 1024 + 20) * layer
    for each in rows.values():
        assert each.decode.work.kv_bytes == each.kv_bytes
    states = contexts_of("qwen35", 512)
    assert states[1] - states[0] == 511 * plan_named("qwen35").kv_bytes_per_token()
    assert states[0] > plan_named("qwen35").state_bytes > 0


def contexts_of(name: str, longest: int) -> list[int]:
    subject = Subject(plan_named(name), KvType.F16, SPEED)
    return [each.kv_bytes for each in contexts(subject, longest)]


def test_other_types_change_the_bytes_and_the_unit(tiny_file: Path) -> None:
    with GGUFFile.open(tiny_file) as file:
        plan, _ = plan_of(file, 64)
        subject = Subject(plan, KvType.F16, SPEED)
        found = {each.name: each for each in variants(file, subject, 9, 16)}
    as_is, q8, q4, f16 = (found[name] for name in ("as it is", "Q8_0", "Q4_0", "F16"))
    assert q8.weight_bytes == as_is.weight_bytes
    head = 259 * 32 * 34 // 32  # stays Q8_0 as llama.cpp has it, since tokens are embedded by it
    assert (q4.weight_bytes - head) * 34 == (as_is.weight_bytes - head) * 18
    assert f16.decode.work.f32_macs > 0 == q4.decode.work.f32_macs
    other = found["keys and values q8_0"]
    assert other.weight_bytes == as_is.weight_bytes
    ratio = kv_value_bytes(plan, KvType.Q8_0) / 2
    assert other.decode.work.kv_bytes == pytest.approx(ratio * as_is.decode.work.kv_bytes)
    assert ratio == 9 / 16  # of heads of 16 values with one scale


def test_guesses_pay_from_where_their_tokens_outweigh_their_cost() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert Guess(1, cost=1.5).break_even == pytest.approx(0.5)
    assert Guess(2, cost=1.75).break_even == pytest.approx(0.5)
    assert Guess(2, cost=3.0).break_even is None
    assert Guess(3, cost=1.0).break_even == pytest.approx(0.0, abs=1e-9)
    assert Guess(2, cost=0.875).gain(0.5) == 2.0
    costs = [each.cost for each in guesses(subject_of(), 10)]
    assert len(costs) == 8
    assert costs == sorted(costs)


# -- beside a record -----------------------------------------------------------------------------


def record_like(subject: Subject, batches: tuple[int, ...], factors: tuple[float, ...]) -> Record:
    """As if every step took its least time, times a factor for each repeat."""
    measured = []
    for n in batches:
        bound = subject.bound(Case("decode", 8, 60, n))
        seconds = tuple(bound.seconds * factor for factor in factors)
        median = sorted(seconds)[len(seconds) // 2]
        measured.append(Measured(bound.case, seconds, median, 8 * n / median))
    return Record(Path("x.json"), "", "", 0, subject.speed, 64, tuple(measured))


@settings(max_examples=25)
@given(intensity=st.floats(1.0, 12.0), slower=st.floats(0.1, 10))
def test_what_takes_its_least_time_is_measured_to_cross_where_it_is_calculated_to(
    intensity: float, slower: float
) -> None:
    """At any common slowness: the machine of the record need not reach its limits."""
    speed = Speed(20e9 * intensity, 20e9 * intensity, 20e9)
    subject = subject_of("llama", speed, kv_heads=1)
    record = record_like(subject, (1, 2, 4, 8, 16, 32), (slower, 2 * slower, slower))
    (found,) = crossings(record, subject)
    (knee,) = knees_of(subject, [], record)
    assert knee.measured == found
    assert found.low == pytest.approx(found.n_seqs, rel=1e-6)
    assert found.high == pytest.approx(found.n_seqs, rel=1e-6)
    assert knee.calculated is not None
    if knee.calculated <= 28:
        # The contexts of the record's steps, of which the first and the last.
        ends = [subject.crossover(context) or 99 for context in (61, 68)]
        assert min(ends) - 1.01 < found.n_seqs <= max(ends) + 0.01
    elif knee.calculated > 33:
        assert found.is_beyond


def test_one_batch_alone_tells_no_crossing() -> None:
    subject = subject_of()
    assert crossings(record_like(subject, (1,), (1.0,)), subject) == []
    assert crossings(record_like(subject, (2, 4), (1.0,)), subject) == []


@pytest.fixture(scope="module")
def record(tiny_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command itself."""
    command = [sys.executable, "-m", "martlet.scripts.cli", "bench", str(tiny_file), "--json"]
    sizes = ("--prefill", "8", "--decode", "4", "--batch", "2,4", "--depth", "0,4")
    done = subprocess.run([*command, *sizes, *SMALL_BENCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("record") / "record.json"
    path.write_text(done.stdout)
    return path


def test_the_command_puts_measured_beside_calculated(
    martlet: Martlet, tiny_file: Path, record: Path
) -> None:
    done = martlet("explain", str(tiny_file), *GIVEN, "--bench", str(record), "--json")
    assert done.returncode == 0, done.stderr
    report, bench = json.loads(done.stdout), json.loads(record.read_text())
    assert [case["case"] for case in report["cases"]] == [case["case"] for case in bench["cases"]]
    for mine, theirs in zip(report["cases"], bench["cases"], strict=True):
        for key in ("int8_macs", "f32_macs", "weight_bytes", "kv_bytes"):
            assert mine["calculated"][key] == theirs[key], (mine["case"], key)
        assert mine["measured"]["tokens_per_s"] == pytest.approx(theirs["tokens_per_s"]["median"])
    assert [each["context"] for each in report["crossovers"]] == [2, 6]
    assert all(each["measured"]["n_seqs"] > 0 for each in report["crossovers"])
    assert report["guesses"][0]["measured"]["cost"] > 0  # two rows: the record has two sequences
    assert report["guesses"][1]["measured"] is None
    assert report["limits_per_s"]["int8_macs"] == 100e9

    done = martlet("explain", str(tiny_file), *GIVEN, "--bench", str(record), "-c", "9")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (asked,) = (line for line in lines if line.startswith("decode 1 x 8 @ 8 "))
    assert asked.split()[-2:] == ["-", "-"]
    (known,) = (line for line in lines if line.startswith("decode 4 x 2 @ 4 "))
    assert known.endswith("%")


def test_without_a_record_all_is_calculated(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("explain", str(tiny_file), *GIVEN, "--batch", "1,3", "-c", "9", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    labels = ["prefill 512", "decode 1 @ 8", "decode 1 x 3 @ 8"]
    assert [case["case"] for case in report["cases"]] == labels
    assert {case["measured"] for case in report["cases"]} == {None}
    assert report["record"] is None


@pytest.mark.parametrize(
    ("text", "told"),
    [("{}", "KeyError"), ("nonsense", "JSONDecodeError"), ('{"limits_per_s": 3}', "Error")],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ComparisonError, match=f"no record.*{told}"):
        read_record(path)


def test_refusals_are_one_line(
    martlet: Martlet, tiny_file: Path, tmp_path: Path, record: Path
) -> None:
    changed = json.loads(record.read_text())
    changed["model"]["weight_bytes_per_step"] += 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    for arguments, code, told in (
        (("--bench", str(other)), 1, "of another model"),
        (("-o", "x.bmp"), 2, "must end in .svg"),
        (("-c", "0"), 2, "--context is '0'"),
    ):
        done = martlet("explain", str(tiny_file), *GIVEN, *arguments)
        assert done.returncode == code
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_an_encoder_has_nothing_to_explain(martlet: Martlet) -> None:
    done = martlet("explain", str(gguf_of("bert")), *GIVEN)
    assert done.returncode == 1
    assert "does not generate" in done.stderr


def test_the_picture_has_every_case_and_both_regions(tiny_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with GGUFFile.open(tiny_file) as file:
        plan, _ = plan_of(file, 64)
        subject = Subject(plan, KvType.F16, SPEED)
        found = record_like(subject, (1, 2, 4, 64), (1.0, 1.1))
        cases = [Case("prefill", 16), *(m.case for m in found.cases)]
        report = put_together(file, subject, cases, [], 64, 16, found, "as given")
    left, right = explain_plot.picture_of(report, subject).axes
    points = {each.get_label(): len(each.get_offsets()) for each in left.collections}
    assert points == {"decode, calculated": 4, "decode, measured": 4, "prefill, calculated": 1}
    assert {text.get_text() for text in right.get_legend().get_texts()} >= {
        *("memory binds", "multiplying binds")
    }
    out = tmp_path / "a.svg"
    explain_plot.draw(out, report, subject)
    explain_plot.draw(tmp_path / "b.svg", report, subject)
    assert out.read_bytes() == (tmp_path / "b.svg").read_bytes()
