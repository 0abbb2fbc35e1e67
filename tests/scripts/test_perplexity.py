"""llama-perplexity's protocol on models whose probabilities are known by construction."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from martlet.quant.errors import MartletError
from martlet.runtime.executors.reference import ReferenceExecutor
from martlet.runtime.step import Step
from martlet.scripts.errors import TextTooShort
from martlet.scripts.perplexity import Perplexity, chunk_nll, measure, token_nll
from martlet.scripts.scored_text import chunks_of, read_text, rows_per_step

from ..runtime.tiny import tiny_model
from .conftest import Martlet

FLOAT32_SUM = 1e-6  # relative; exponentials are float32


class Scripted:
    """Two tokens; 1 always has probability 3/4. Checks that every step continues its sequence."""

    name, max_rows, block_tokens, n_blocks = "scripted", 3, 4, 8

    def __init__(self) -> None:
        self.n_past = 0
        self.seen: list[list[int]] = []

    def run(self, step: Step) -> np.ndarray:
        if step.positions[0] == 0:
            self.n_past = 0
            self.seen.append([])
        assert step.n_rows <= self.max_rows
        assert step.positions.tolist() == list(range(self.n_past, self.n_past + step.n_rows))
        assert step.seq_start.tolist() == [0, step.n_rows]
        assert len(set(step.block_table[0].tolist())) * self.block_tokens > step.positions[-1]
        self.n_past += step.n_rows
        self.seen[-1] += step.tokens.tolist()
        return np.tile(np.float32([0, math.log(3)]), (step.n_out, 1))

    def copy_block(self, src: int, dst: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class Letters:
    """Each character a token: its digit; BOS is 9."""

    bos_id = 9

    def __init__(self, *, add_bos: bool) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert add_special
        assert not parse_special
        return [self.bos_id] * self.add_bos + [int(letter) for letter in text]


def test_the_second_half_but_its_first_token_is_scored() -> None:
    # 8 tokens: positions 4 … 6 predict tokens 5 … 7, here 1, 0, 1
    nll = chunk_nll(Scripted(), [0, 0, 0, 0, 0, 1, 0, 1], rows=3)
    assert nll == pytest.approx([math.log(4 / 3), math.log(4), math.log(4 / 3)], rel=FLOAT32_SUM)


def test_perplexity_and_error_by_hand() -> None:
    executor = Scripted()
    seen: list[int] = []
    chunks = [[0, 0, 0, 0, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1]]
    result = measure(executor, chunks, 2, lambda done, _: seen.append(done))
    # five times 3/4, once 1/4: mean nll = (5 ln(4/3) + ln 4) / 6
    values = [math.log(4 / 3)] * 5 + [math.log(4)]
    mean = sum(values) / 6
    variance = sum(v * v for v in values) / 6 - mean**2
    assert result.perplexity == pytest.approx((4**6 / 3**5) ** (1 / 6), rel=FLOAT32_SUM)
    expected_error = math.exp(mean) * math.sqrt(variance / 5)
    assert result.standard_error == pytest.approx(expected_error, rel=FLOAT32_SUM)
    assert (result.n_chunks, result.n_scored, seen) == (2, 6, [1, 2])
    assert executor.seen == [chunk[:7] for chunk in chunks]  # each from position 0


def test_a_chunk_of_512_scores_255_tokens() -> None:
    class Wide(Scripted):
        max_rows = 64

    assert len(chunk_nll(Wide(), [1] * 512, 64)) == 255


def test_chunks_drop_the_tail_and_begin_with_bos_only_if_the_model_does() -> None:
    assert chunks_of("0123401234567", Letters(add_bos=False), 5, None) == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    assert chunks_of("0123401234567", Letters(add_bos=True), 5, None) == [
        [9, 0, 1, 2, 3],
        [9, 0, 1, 2, 3],  # 4 became BOS
    ]


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (2, 2), (7, 3), (None, 3)])
def test_the_first_chunks_are_taken(asked: int | None, got: int) -> None:
    assert len(chunks_of("0" * 14, Letters(add_bos=False), 4, asked)) == got


def test_two_chunks_are_the_least() -> None:
    assert len(chunks_of("0" * 8, Letters(add_bos=False), 4, None)) == 2
    with pytest.raises(TextTooShort, match=r"7 tokens.*needs 8"):
        chunks_of("0" * 7, Letters(add_bos=False), 4, None)


@pytest.mark.parametrize(
    ("content", "text"), [(b"a\n", "a"), (b"a\n\n", "a\n"), (b"a\r\n", "a\r"), (b"\\n", "\\n")]
)
def test_one_newline_is_dropped_and_nothing_else_changed(
    tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    assert read_text(path) == text


def test_bytes_that_are_no_text_are_told_by_place(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"ab\xff")
    with pytest.raises(MartletError, match="not UTF-8 at byte 2"):
        read_text(path)


def test_large_logits_do_not_overflow() -> None:
    logits = np.float32([[1e4, 1e4, -1e4]])
    assert token_nll(logits, np.array([0])) == pytest.approx([math.log(2)])


def test_one_scored_token_has_no_error_bar() -> None:
    assert math.isnan(Perplexity.from_nll(np.array([1.0]), 1).standard_error)


@pytest.mark.parametrize(("vocab", "rows"), [(1000, 3), (4 << 20, 3), (8 << 20, 2), (1 << 30, 1)])
def test_rows_shrink_with_the_vocabulary(vocab: int, rows: int) -> None:
    assert rows_per_step(Scripted(), vocab) == rows


def reference(max_rows: int) -> ReferenceExecutor:
    model = tiny_model("llama")
    return ReferenceExecutor(model.plan(max_rows), model.weights, n_blocks=4, block_tokens=16)


@pytest.mark.parametrize("rows", [1, 7, 33, 64])
def test_the_cut_into_steps_changes_nothing(rows: int) -> None:
    """Also covers steps that want no logits at all."""
    tokens: Sequence[int] = [(7 * i) % 300 for i in range(48)]
    whole = chunk_nll(reference(64), tokens, 64)
    assert chunk_nll(reference(64), tokens, rows) == pytest.approx(whole, rel=1e-5)


def test_the_command_reports_the_protocol(
    martlet: Martlet, tiny_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4 + "\n")
    options = ["-f", str(text), "-c", "32", "--executor", "reference"]
    done = martlet("perplexity", str(tiny_file), *options, "--chunks", "2", "--json")
    result = json.loads(done.stdout)
    assert (result["n_chunks"], result["n_ctx"], result["n_scored"]) == (2, 32, 30)
    assert math.log(result["perplexity"]) == pytest.approx(result["mean_nll"])
    shown = martlet("perplexity", str(tiny_file), *options, "--chunks", "2").stdout
    assert shown.startswith(f"perplexity {result['perplexity']:.4f} ± ")
