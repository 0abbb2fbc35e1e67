"""`martlet bench-serve` from its words to its table, its records and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from martlet.scripts.cli import main
from martlet.scripts.compare_rules import MUST_KNOW
from martlet.scripts.records import read_records

from .paced_server import PacedServer, paced_server
from .tiny_file import write_tiny_model


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, PacedServer]]:
    with paced_server() as both:
        yield both


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as done:
        main(["bench-serve", *map(str, words)])
    return int(done.value.code or 0)


class Page(HTMLParser):
    """Counts elements and keeps what would be loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.loaded: list[str | None] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_sweep_over_streams(
    server: tuple[str, PacedServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, paced = server
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    begun = len(paced.asked)
    words = ["--concurrency", "1,2", "-n", 3, "--repeat", 2, "--prompt", 5, "--output", 4]
    words += ["--goodput", "ttft:60000", "--condition", "threads=2", "-o", out, "--html", html]
    assert command(url, *words) == 0
    told = capsys.readouterr().out
    for part in ("1 streams", "2 streams", "ttft p50", "goodput", "100%", "docs/metrics.md"):
        assert part in told
    one, two = read_records(out)
    assert (one.conditions["load"], two.conditions["load"]) == ("1 streams", "2 streams")
    assert one.conditions["threads"] == "2"
    assert {"cpu", "cores", "quota", "os", "governor", "load_before"} <= set(one.conditions)
    # Nobody told of the model's file: whoever compares will be told that.
    assert "model_sha256" in MUST_KNOW
    assert "model_sha256" not in one.conditions
    runs = one.details["runs"]
    assert [len(run["requests"]) for run in runs] == [3, 3]
    assert all(each["n_output"] == 4 for run in runs for each in run["requests"])
    assert len(one.figures["output_tokens_per_s"].samples) == 2
    # Warm-up requests were asked, and are in no figure.
    assert len(paced.asked) - begun == (1 + 2) + 2 * 2 * 3
    prompts = [each["prompt"] for each in paced.asked[begun:]]
    assert len(set(prompts)) == len(prompts)
    assert all(each["ignore_eos"] for each in paced.asked[begun:])
    page = Page(html.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.loaded == []
    assert page.count["svg"] >= 4 + 2 * 3
    assert "color-scheme" in html.read_text()


def test_warm_prompts_were_sent_before(server: tuple[str, PacedServer]) -> None:
    url, paced = server
    begun = len(paced.asked)
    words = ["-n", 2, "--repeat", 1, "--warm-up", 0, "--cache", "warm", "--seed", 5]
    assert command(url, "--prompt", 6, "--output", 1, *words) == 0
    prompts = [each["prompt"] for each in paced.asked[begun:]]
    assert prompts[:2] == prompts[2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say whom to ask"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["ftp://x", "--name", "m"], "no file and no model called"),
        (["URL", "--concurrency", "0"], "--concurrency"),
        (["URL", "--rate", "0"], "--rate"),
        (["URL", "--rate", "1", "--concurrency", "2"], "only one of"),
        (["URL", "--goodput", "speed:3"], "--goodput is 'speed:3'"),
        (["URL", "--goodput", "ttft:3", "--no-stream"], "cannot be seen with --no-stream"),
        (["URL", "--extra", "[1]"], "no JSON object"),
        (["URL", "-o", "nowhere/r.json"], "nowhere/r.json: there is no folder"),
        (["URL", "--condition", "threads"], "expected NAME=VALUE"),
        (["--direct", "m", "--endpoint", "chat"], "--direct has no chat template"),
        (["--run", "x=false {ports}", "--repeat", "1"], "there are {port}, {threads}, {streams}"),
        (["--run", "x=false {port}", "--repeat", "1"], "it ended with code 1 at its start"),
    ],
)
def test_what_makes_no_sense_is_refused(
    server: tuple[str, PacedServer],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert command(*(server[0] if word == "URL" else word for word in words)) in (1, 2)
    assert message.lower() in capsys.readouterr().err.lower()


def test_a_server_of_ours_and_its_engine_in_turns(tmp_path: Path) -> None:
    """The same prompts, of exact lengths, and all conditions that a comparison wants."""
    model, out = write_tiny_model(tmp_path / "tiny.gguf"), tmp_path / "r.json"
    words = ["--direct", model, "--concurrency", 2, "-n", 4, "--prompt", 20, "--output", 5]
    words += ["--repeat", 3, "--context", 64, "--threads", 1, "-o", out]
    assert command(model, *words) == 0
    served, direct = read_records(out)
    assert (served.conditions["transport"], direct.conditions["transport"]) == ("http", "direct")
    assert served.session == direct.session
    for record in (served, direct):
        assert not [name for name in MUST_KNOW if name not in record.conditions]
        requests = [each for run in record.details["runs"] for each in run["requests"]]
        assert {(each["n_prompt"], each["n_output"]) for each in requests} == {(20, 5)}
        assert {each["outcome"] for each in requests} == {"ok"}
        assert all(each["server"]["queue_ms"] >= 0 for each in requests)
        assert record.details["runs"][0]["kv"]
    with pytest.raises(SystemExit) as done:
        main(["bench-compare", str(out), "--json"])
    assert done.value.code == 0
    json.dumps(served.as_json())
