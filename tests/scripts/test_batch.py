"""`martlet batch`: each request of a file is answered once, whatever happens on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from martlet.scripts.batch_file import Answers, BatchError, known_ids, read_requests

from .conftest import Martlet

CHAT, TEXT, VECTOR = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "once", "max_tokens": 8, "seed": 1, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "none is answered twice"
    return by_id


def texts(path: Path) -> dict[str, str]:
    return {
        custom_id: each["response"]["body"]["choices"][0]["text"]
        for custom_id, each in read(path).items()
    }


def test_every_route_is_answered_and_refusals_are_told(
    martlet: Martlet, tiny_file: Path, tmp_path: Path
) -> None:
    lines = [
        line("text"),
        line("long", prompt="word " * 5000),
        line("other model", model="gpt"),
        {**line("chat", CHAT), "body": {"messages": [{"role": "user", "content": "a"}]}},
        {**line("vector", VECTOR), "body": {"input": "a"}},
        {**line("items", "/v1/responses"), "body": {"input": "a", "max_output_tokens": 3}},
    ]
    lines[3]["body"]["max_tokens"] = 4
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = martlet("batch", str(source), str(out), "-m", str(tiny_file), "--context", "512")
    assert done.returncode == 0, done.stderr
    assert "6 requests, 6 answered now: 2 refused" in done.stdout
    found = read(out)
    assert found.keys() == {each["custom_id"] for each in lines}
    status = {name: each["response"]["status_code"] for name, each in found.items()}
    refused = {"long": 400, "other model": 404}
    assert status == {**dict.fromkeys(found, 200), **refused}
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 8
    assert "error" in found["long"]["response"]["body"]
    assert all(each["error"] is None and each["response"]["request_id"] for each in found.values())
    again = martlet("batch", str(source), str(out), "-m", str(tiny_file))
    assert "6 requests, all answered" in again.stdout


def test_killed_at_random_and_resumed_it_answers_each_once(tiny_file: Path, tmp_path: Path) -> None:
    draw, n = Random(4), 150
    lines = [
        line(
            f"r{i}", prompt="word " * draw.randrange(1, 60), seed=i, max_tokens=60, ignore_eos=True
        )
        for i in range(n)
    ]
    source = write(tmp_path / "in.jsonl", lines)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "martlet.scripts.cli", "batch", str(source), str(out)]
        options = ["-m", str(tiny_file), "--context", "512", "--threads", "1"]
        return subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    assert start(whole).wait(120) == 0
    n_kills = 0
    for least in (1, 40, 80):
        with start(out) as child:
            end = time.monotonic() + 60
            while child.poll() is None and time.monotonic() < end:
                if out.exists() and out.read_bytes().count(b"\n") >= least:
                    time.sleep(draw.random() / 50)
                    child.kill()
                    break
                time.sleep(0.002)
        n_kills += child.returncode == -9
        with out.open("ab") as file:  # as a write that was cut leaves it
            file.write(b'{"id":"batch_req_1","custom_id":"r')
    assert n_kills, "at least one was killed on its way"
    assert start(out).wait(120) == 0
    assert texts(out) == texts(whole)
    assert len(texts(out)) == n


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "line 1 is no JSON"),
        ("\n[1]", "line 2 is no JSON object"),
        (json.dumps({**line("a"), "custom_id": ""}), "custom_id must be a string"),
        (json.dumps({**line("a"), "custom_id": 3}), "custom_id must be a string"),
        (json.dumps(line("a", "/v1/files")), "url must be POST and one of"),
        (json.dumps({**line("a"), "method": "GET"}), "url must be POST and one of"),
        (json.dumps({**line("a"), "body": []}), "body must be an object"),
        (json.dumps(line("a", stream=True)), "leave stream out"),
        (json.dumps(line("a")) + "\n" + json.dumps(line("a")), "'a' stands there twice"),
        ("\udcff", "line 1 is no JSON"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_with_its_line(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BatchError, match=told):
        known_ids(path)


def test_nothing_is_written_for_a_file_that_is_refused(
    martlet: Martlet, tiny_file: Path, tmp_path: Path
) -> None:
    source, out = write(tmp_path / "in.jsonl", [line("a"), line("a")]), tmp_path / "out.jsonl"
    done = martlet("batch", str(source), str(out), "-m", str(tiny_file))
    assert done.returncode == 1
    assert "stands there twice" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [("# notes\n", "something else"), ('{"custom_id": "z"}\n', "'z', which is not asked")],
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(BatchError, match=told):
        Answers(path, {"a"})
    assert path.read_text() == text


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    with Answers(tmp_path / "out.jsonl", {"a"}) as first:
        first.add("a", 200, "x", {})
        with pytest.raises(BatchError, match="another batch"):
            Answers(tmp_path / "out.jsonl", {"a"})
    assert Answers(tmp_path / "out.jsonl", {"a"}).answered == {"a"}


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 400), bodies=st.lists(st.text(max_size=9), min_size=1, max_size=6))
def test_wherever_a_file_was_cut_its_whole_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int, bodies: list[str]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    ids = {f"r{i}" for i in range(len(bodies))}
    with Answers(path, ids) as answers:
        for i, body in enumerate(bodies):
            answers.add(f"r{i}", 200, "x", {"text": body})
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data[: data.rfind(b"\n") + 1]
    with Answers(path, ids) as answers:
        assert len(answers.answered) == whole.count(b"\n")
        left = sorted(ids - answers.answered)
        for custom_id in left:
            answers.add(custom_id, 200, "x", {})
    assert path.read_bytes().startswith(whole)
    assert read(path).keys() == ids


def test_requests_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line("a")) + "\n\nno JSON\n")
    found = read_requests(path)
    assert next(found).custom_id == "a"
    with pytest.raises(BatchError, match="line 3"):
        next(found)
