"""The command: what it prints, what its JSON holds, what it refuses."""

import json
from pathlib import Path

import pytest
from martlet.scripts.bench_report import significant, table
from martlet.scripts.compare_rules import MUST_KNOW
from martlet.scripts.records import read_records

from .conftest import Martlet

SMALL = ("--prefill", "8", "--decode", "2", "--batch", "2", "--depth", "0,4", "--read-mb", "64")
REFERENCE = ("--executor", "reference")
LABELS = ["prefill 8", "decode 2", "decode 2 x 2", "prefill 8 @ 4", "decode 2 @ 4"]


def test_json_holds_every_sample_and_what_it_means(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("bench", str(tiny_file), *SMALL, *REFERENCE, "--repeat", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["executor"] == "reference"
    assert report["model"]["file"] == "tiny.gguf"
    assert report["threads"] >= 1
    assert report["threads_reason"]
    assert report["machine"]["cpu"]
    assert report["date"].endswith("+00:00")
    assert [case["case"] for case in report["cases"]] == [*LABELS, "decode 2 x 2 @ 4"]
    for case in report["cases"]:
        seconds, rate = case["seconds"], case["tokens_per_s"]
        assert len(seconds["samples"]) == 3
        assert seconds["min"] <= seconds["median"] <= seconds["max"]
        n_tokens = case["n_tokens"] * case["n_seqs"]
        assert rate["median"] == pytest.approx(n_tokens / seconds["median"])
        macs = case["int8_macs"] + case["f32_macs"]
        assert case["gmac_per_s"] == pytest.approx(macs / seconds["median"] / 1e9)
        check_limit(case, report["limits_per_s"])
    kept = read_records(saved(report, tiny_file.with_name("bench.json")))
    assert [record.conditions["load"] for record in kept] == [c["case"] for c in report["cases"]]
    assert not [name for name in MUST_KNOW for record in kept if name not in record.conditions]
    for record, case in zip(kept, report["cases"], strict=True):
        assert [*record.figures["tokens_per_s"].samples] == case["tokens_per_s"]["samples"]


def saved(report: dict, path: Path) -> Path:
    path.write_text(json.dumps(report), encoding="utf-8")
    return path


def check_limit(case: dict, limits: dict) -> None:
    if not limits:  # no native library to measure with
        assert case["limit_share"] is None
        return
    read = max(limits[name]["median"] for name in ("read_bytes", "read_bytes_model_size"))
    multiply = case["int8_macs"] / limits["int8_macs"]["median"]
    memory = (case["weight_bytes"] + case["kv_bytes"]) / read
    least = max(multiply, memory)
    assert case["limit_share"] == pytest.approx(least / case["seconds"]["median"])
    assert case["limit_binds"] == ("multiply" if multiply > memory else "memory")


def test_the_table_has_a_line_per_case(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("bench", str(tiny_file), *SMALL, *REFERENCE, "--repeat", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for label in LABELS:
        assert sum(line.startswith(f"{label}  ") for line in lines) == 1
    assert any(line.startswith("limits") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--batch", "1,x"), 2, "--batch is '1,x'"),
        (("--depth", "-1"), 2, "--depth"),
        (("--repeat", "0"), 2, "--repeat"),
        (("--prefill", "0", "--decode", "0"), 1, "nothing to measure"),
        (("--batch", "500", *REFERENCE), 1, "exceed 256 rows"),
        (("--depth", "100000000000"), 1, "available; ask for fewer"),
    ],
)
def test_refusals_are_one_line(
    martlet: Martlet, tiny_file: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    done = martlet("bench", str(tiny_file), "--read-mb", "64", *arguments)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_numbers_keep_three_digits() -> None:
    assert [significant(v) for v in (1234.5, 123.4, 99.96, 12.34, 9.996, 1.234, 0.0)] == [
        *("1,234", "123", "100", "12.3", "10.0", "1.23", "0.00")
    ]


def test_columns_fit_their_widest_cell() -> None:
    assert table(("case", "t/s"), [("a", "1"), ("longer", "1,000")]) == [
        "case      t/s",
        "a           1",
        "longer  1,000",
    ]
