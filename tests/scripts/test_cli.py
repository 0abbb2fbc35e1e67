"""The commands as a person meets them: output, one-line errors, exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from martlet.quant.errors import MartletError
from martlet.scripts import cli, console, doctor
from typer.testing import CliRunner

from .conftest import Martlet
from .tiny_file import write_tiny_model

SLOW_IMPORTS = ("numpy", "numba", "fastapi", "uvicorn", "gguf", "huggingface_hub", "tokenizers")
REFERENCE = ("--executor", "reference")


def only_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from martlet.scripts import cli;"
        f"print([m for m in {SLOW_IMPORTS} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bogus"], "bogus"),
        (["run"], "martlet run --help"),
        (["run", "m", "-p", "x", "-n", "0"], "martlet run --help"),
        (["run", "m", "-p", "x", "--executor", "gpu"], "executor"),
        (["serve", "m", "--port", "70000"], "martlet serve --help"),
    ],
)
def test_wrong_usage_is_one_line_with_the_way_to_help(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == console.EXIT_USAGE
    line = only_line(result.stderr)
    assert line.startswith("error: ")
    assert told in line
    assert re.search(r"[.?] See `martlet.* --help`\.$", line)


def test_the_version_is_one_line() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(r"martlet \S+\n", result.stdout)


@pytest.mark.parametrize("command", ["run", "chat", "serve", "inspect", "perplexity"])
def test_an_unknown_model_is_one_line(martlet: Martlet, tmp_path: Path, command: str) -> None:
    text = tmp_path / "text"
    text.write_text("x")
    more = {"run": ["-p", "x"], "perplexity": ["-f", str(text)]}
    done = martlet(command, "smollm2", *more.get(command, []))
    assert done.returncode == console.EXIT_ERROR
    assert "did you mean smollm2-135m?" in only_line(done.stderr)
    assert done.stdout == ""


def test_a_file_that_is_no_model_is_one_line(martlet: Martlet, tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!DOCTYPE html>" + "\x1b[31m" * 40)
    done = martlet("run", str(path), "-p", "x")
    assert done.returncode == console.EXIT_ERROR
    assert "page.gguf" in only_line(done.stderr)


@pytest.mark.parametrize(("where", "shown"), [("variable", True), ("option", True), ("", False)])
def test_a_traceback_only_when_asked_for(martlet: Martlet, where: str, shown: bool) -> None:
    before = ["--debug"] if where == "option" else []
    environ = {"MARTLET_DEBUG": "1"} if where == "variable" else {}
    done = martlet(*before, "inspect", "absent.gguf", **environ)
    assert done.returncode != 0
    assert ("Traceback" in done.stderr) == shown


@pytest.mark.parametrize("command", [("run", "-p", "hi"), ("chat",), ("serve",)])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--draft-vocab", "x"), "--draft-vocab is 'x'"),
        (("--draft-vocab", "9:/none.txt"), "/none.txt: No such file"),
        (("--draft-vocab", "9", "--speculate", "off"), "--draft-vocab guesses nothing"),
        (("--draft", "m.gguf", "--speculate", "off"), "--draft guesses nothing"),
    ],
)
def test_guesses_are_refused_before_a_model_is_opened(
    tiny_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    options: tuple[str, ...],
    told: str,
) -> None:
    from martlet.scripts import generate

    monkeypatch.setattr(generate, "open_model", None)
    result = CliRunner().invoke(cli.app, [command[0], str(tiny_file), *command[1:], *options])
    assert result.exit_code == 1
    assert told in only_line(result.stderr)


def command_that(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=console.OneLineErrors, pretty_exceptions_enable=False)

    @app.command("fail")
    def fail() -> None:
        raise error

    app.callback()(lambda: None)
    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MartletError("too\nbad"), console.EXIT_ERROR, "error: too bad"),
        (MartletError("\x1b]0;x\x07"), console.EXIT_ERROR, "error: \ufffd]0;x\ufffd"),
        (FileNotFoundError(2, "No such file", "a.txt"), console.EXIT_ERROR, "a.txt: No such file"),
        (OSError("disk on fire"), console.EXIT_ERROR, "error: disk on fire"),
        (ModuleNotFoundError("x", name="numba"), console.EXIT_ERROR, "error: this needs numba"),
        (ModuleNotFoundError("x", name="y"), console.EXIT_BUG, "error: ModuleNotFoundError: x ("),
        (KeyError("k"), console.EXIT_BUG, "error: KeyError: 'k' (a bug; MARTLET_DEBUG=1"),
        (KeyboardInterrupt(), console.EXIT_INTERRUPTED, "error: interrupted"),
    ],
)
def test_errors_become_a_line_and_a_code(error: BaseException, code: int, line: str) -> None:
    result = CliRunner().invoke(command_that(error), ["fail"])
    assert result.exit_code == code
    assert line in only_line(result.stderr)


def test_run_streams_text_and_tells_its_figures(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("run", str(tiny_file), "-p", "hello", "-n", "6", *REFERENCE)
    assert done.returncode == 0
    line = only_line(done.stderr)
    for word in ("ttft", "tpot", "tokens/s", "6 prompt + 6 output tokens", "reference"):
        assert word in line


def test_run_as_json_repeats_with_its_seed(martlet: Martlet, tiny_file: Path) -> None:
    options = ["-n", "6", "--temperature", "1", "--json", *REFERENCE]
    first = json.loads(martlet("run", str(tiny_file), "-p", "hello", *options).stdout)
    seeded = [*options, "--seed", str(first["seed"])]
    second = json.loads(martlet("run", str(tiny_file), "-p", "-", *seeded, stdin="hello").stdout)
    assert second["text"] == first["text"]
    assert first["n_prompt"] == 6  # BOS and five bytes
    assert first["n_output"] == 6
    assert first["finish_reason"] == "length"
    phases = first["queue_ms"] + first["prefill_ms"] + first["decode_ms"]
    assert phases == pytest.approx(first["end_to_end_ms"])
    assert first["ttft_ms"] == pytest.approx(first["queue_ms"] + first["prefill_ms"])
    assert first["tokens_per_s"] == pytest.approx(5000 / first["decode_ms"])
    assert set(first["definitions"]) <= set(first)


def test_run_with_the_chat_template_counts_its_markup(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("run", str(tiny_file), "-p", "hi", "--chat", "-n", "1", "--json", *REFERENCE)
    # "<s>user: hi\n<s>assistant: ": <s> is one token, a space becomes U+2581, three bytes
    letters = "user: hi\nassistant: ".replace(" ", "\u2581").encode()
    assert json.loads(done.stdout)["n_prompt"] == 2 + len(letters)


def test_a_model_without_a_template_says_what_to_use(martlet: Martlet, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "base.gguf", template=None)
    done = martlet("run", str(path), "-p", "hi", "--chat", *REFERENCE)
    assert done.returncode == console.EXIT_ERROR
    assert "no chat template" in only_line(done.stderr)


def test_chat_refuses_a_model_without_a_template_before_a_word(
    martlet: Martlet, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "base.gguf", template=None)
    done = martlet("chat", str(path), *REFERENCE, stdin="hi\n")
    assert done.returncode == console.EXIT_ERROR
    assert "no chat template" in only_line(done.stderr)


def test_chat_explains_a_command_it_does_not_have(martlet: Martlet, tiny_file: Path) -> None:
    options = ["-n", "2", *REFERENCE]
    done = martlet("chat", str(tiny_file), *options, stdin="/help\n/usr/bin\n")
    assert done.stderr.count("/reset forgets") == 2  # at the start and for /help
    assert done.stderr.count("ttft") == 1  # a path is something to say


def test_a_prompt_beyond_the_context_is_refused(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("run", str(tiny_file), "-p", "x" * 40, "--context", "32", *REFERENCE)
    assert done.returncode == console.EXIT_ERROR
    assert "41" in only_line(done.stderr)


def test_chat_answers_each_line_and_forgets_on_reset(martlet: Martlet, tiny_file: Path) -> None:
    lines = "hi\n/reset\nhi\n\n/exit\nnever\n"
    options = ["-n", "4", "--temperature", "0", *REFERENCE]
    done = martlet("chat", str(tiny_file), *options, stdin=lines)
    assert done.returncode == 0
    figures = [line for line in done.stderr.splitlines() if "ttft" in line]
    assert [line.split(" output")[0].split("· ")[-1][-3:] for line in figures] == ["+ 4"] * 2
    first, second = done.stdout.splitlines()[:2]
    assert first == second  # the same conversation twice, so the same greedy answer


def test_doctor_names_a_choice_and_its_reasons(martlet: Martlet, tmp_path: Path) -> None:
    report = json.loads(martlet("doctor", "--json").stdout)
    assert report["executor"]["reference"] == "available"
    assert report["executor"]["chosen"] in ("native", "numba", "reference")
    assert report["threads"]["count"] >= 1
    assert report["cache"]["folder"] == str(tmp_path)
    assert "threads" in martlet("doctor").stdout


def test_doctor_advises_and_tells_scripts() -> None:
    fine = {
        "executor": {"chosen": "native"},
        "isa": {"chosen": "neon"},
        "cache": {"writable": "yes"},
    }
    assert doctor.exit_code(fine) == 0
    for chosen, code in (("numba", 1), ("none; ask for --executor reference", 2)):
        report = {**fine, "executor": {"chosen": chosen}}
        assert doctor.exit_code(report) == code
        assert any("C compiler" in said for said in doctor.advice(report))
    assert doctor.exit_code({**fine, "isa": {"chosen": "none (no z80 here)"}}) == 2
    locked = {**fine, "cache": {"writable": "no; set MARTLET_CACHE"}}
    assert any("MARTLET_CACHE" in said for said in doctor.advice(locked))
    assert any("this CPU" in said for said in doctor.advice({**fine, "isa": {"chosen": "scalar"}}))


def test_doctor_tells_of_an_isa_that_cannot_be(martlet: Martlet) -> None:
    report = json.loads(martlet("doctor", "--json", MARTLET_ISA="z80").stdout)
    if report["executor"]["native"] != "available":
        pytest.skip("no native library here")
    assert "z80" in report["isa"]["chosen"]
    report = json.loads(martlet("doctor", "--json", MARTLET_ISA="scalar").stdout)
    assert report["isa"]["chosen"] == "scalar"


@pytest.mark.parametrize("is_known", [True, False])
def test_b112_an_isa_above_the_cpu_ends_in_words(
    martlet: Martlet, tiny_file: Path, is_known: bool
) -> None:
    from martlet.runtime.executors.native_library import Library, NativeUnavailable

    try:
        above = [name for name, is_there in Library().isas() if not is_there]
    except NativeUnavailable as error:
        pytest.skip(f"native library: {error}")
    for isa in above if is_known else ["z80"]:
        ask = ("run", str(tiny_file), "-p", "x", "-n", "1", "--executor", "native")
        done = martlet(*ask, MARTLET_ISA=isa)
        assert done.returncode == console.EXIT_ERROR, "no signal"
        assert isa in only_line(done.stderr)


# As `taskset` would start it, on one CPU.
ON_ONE_CPU = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from martlet.scripts.cli import main
main(sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no CPU masks")
@pytest.mark.parametrize("threads", ["2", "16"])
def test_b114_threads_beyond_the_affinity_mask_are_warned_of_and_finish(
    tiny_file: Path, threads: str
) -> None:
    ask = ["run", str(tiny_file), "-p", "x", "-n", "20", "--threads", threads, *REFERENCE]
    command = [sys.executable, "-c", ON_ONE_CPU, *ask]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"warning: {threads} threads" in done.stderr


def test_more_threads_than_cpus_are_warned_of(martlet: Martlet, tiny_file: Path) -> None:
    done = martlet("run", str(tiny_file), "-p", "x", "-n", "1", "--threads", "999", *REFERENCE)
    assert done.returncode == 0
    assert "warning: 999 threads" in done.stderr


def test_pull_lists_what_it_knows(martlet: Martlet) -> None:
    rows = {row["name"]: row for row in json.loads(martlet("pull", "--json").stdout)}
    assert rows["smollm2-135m"]["licence"] == "Apache-2.0"
    assert rows["gemma3-270m"]["path"] is None


def test_pull_of_a_path_prints_it(martlet: Martlet, tiny_file: Path) -> None:
    assert only_line(martlet("pull", str(tiny_file)).stdout) == str(tiny_file)


def test_a_file_of_scripts_runs_on_its_own(tiny_file: Path) -> None:
    script = Path(cli.__file__).with_name("inspect_model.py")
    command = [sys.executable, str(script), str(tiny_file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model"]["name"] == "tiny llama"


def test_a_reader_that_leaves_early_gets_no_traceback(tiny_file: Path) -> None:
    command = [sys.executable, "-m", "martlet.scripts.cli", "inspect", str(tiny_file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        assert b"Traceback" not in child.stderr.read()
    assert child.returncode == console.EXIT_ERROR
