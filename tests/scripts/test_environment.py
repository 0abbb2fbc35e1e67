"""The bootstrap: when it installs again, what it does without a compiler, how it fails."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from martlet.scripts import environment
from martlet.scripts.environment import SetupError, Stamp

START = Path(__file__).resolve().parents[2] / "scripts" / "start.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "csrc" / "deep").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "csrc" / "deep" / "kernel.c").write_text("int one;\n")
    return root


class Installs:
    """Stands for venv and pip: notes what was asked and leaves what they would leave."""

    def __init__(self, *, builds: bool = True) -> None:
        self.builds = builds
        self.asked: list[tuple[tuple[str, ...], bool]] = []

    def make_venv(self, venv: Path, *, fresh: bool) -> None:
        if fresh:
            shutil.rmtree(venv)
        python = environment.venv_python(venv)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    def install(self, venv: Path, root: Path, extras: tuple[str, ...], *, native: bool) -> None:
        self.asked.append((tuple(extras), native))
        folder = venv / "lib/python3/site-packages/martlet/runtime/executors"
        folder.mkdir(parents=True, exist_ok=True)
        (venv / "install.log").write_text("fine\nkernels.c:3: error: no such thing\nninja: stopped")
        if native and self.builds:
            (folder / "libmartlet.so").touch()


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    fake = Installs()
    monkeypatch.setattr(environment, "make_venv", fake.make_venv)
    monkeypatch.setattr(environment, "install", fake.install)
    monkeypatch.setattr(environment, "find_compiler", lambda environ: "/usr/bin/cc")
    return fake


def test_a_second_start_installs_nothing(root: Path, installs: Installs) -> None:
    first = environment.prepare(root, ("test",))
    assert environment.prepare(root, ("test",)) == first
    assert installs.asked == [(("test",), True)]


@pytest.mark.parametrize(
    ("path", "text"),
    [("csrc/deep/kernel.c", "int two;\n"), ("csrc/new.h", ""), ("pyproject.toml", "[tool]\n")],
)
def test_a_change_in_c_or_metadata_installs_again(
    root: Path, installs: Installs, path: str, text: str
) -> None:
    environment.prepare(root, ())
    (root / path).write_text(text)
    environment.prepare(root, ())
    assert len(installs.asked) == 2


def test_a_touched_file_with_the_same_content_does_not(root: Path, installs: Installs) -> None:
    environment.prepare(root, ())
    os.utime(root / "csrc/deep/kernel.c", (1, 1))
    (root / "unrelated.py").write_text("x = 1\n")
    environment.prepare(root, ())
    assert len(installs.asked) == 1


def test_extras_add_up_and_fewer_need_nothing(root: Path, installs: Installs) -> None:
    environment.prepare(root, ("test",))
    environment.prepare(root, ())
    environment.prepare(root, ("lint",))
    environment.prepare(root, ("test", "lint"))
    assert [extras for extras, _ in installs.asked] == [("test",), ("lint", "test")]


def test_a_moved_checkout_gets_a_fresh_environment(root: Path, installs: Installs) -> None:
    environment.prepare(root, ())
    (root / ".venv" / "old").touch()
    moved = root.rename(root.with_name("moved"))
    environment.prepare(moved, ())
    assert len(installs.asked) == 2
    assert not (moved / ".venv" / "old").exists()


def test_a_failed_installation_is_not_vouched_for(
    root: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.prepare(root, ())
    (root / "csrc/new.c").touch()

    def fail(*_: object, **__: object) -> None:
        raise SetupError("pip failed")

    monkeypatch.setattr(environment, "install", fail)
    with pytest.raises(SetupError):
        environment.prepare(root, ())
    monkeypatch.setattr(environment, "install", installs.install)
    environment.prepare(root, ())
    assert len(installs.asked) == 2


def test_without_a_compiler_the_c_part_is_left_out_and_one_line_says_so(
    root: Path,
    installs: Installs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(environment, "find_compiler", lambda environ: None)
    environment.prepare(root, (), native_must_build=True)
    assert installs.asked == [((), False)]
    said = [line for line in capsys.readouterr().err.splitlines() if "compiler" in line]
    assert len(said) == 1
    assert "Numba executor serves" in said[0]


def test_a_compiler_that_appears_later_is_used(
    root: Path, installs: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(environment, "find_compiler", lambda environ: None)
        environment.prepare(root, ())
    environment.prepare(root, ())
    assert [native for _, native in installs.asked] == [False, True]


def test_broken_c_code_stops_the_tests_but_not_the_start(
    root: Path, installs: Installs, capsys: pytest.CaptureFixture[str]
) -> None:
    installs.builds = False
    environment.prepare(root, ())
    assert "did not build" in capsys.readouterr().err
    with pytest.raises(SetupError, match=r"did not build.*install\.log"):
        environment.prepare(root, (), native_must_build=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown[-2:] == ["kernels.c:3: error: no such thing", "ninja: stopped"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"root": 1}', '{"root":"","extras":1}'])
def test_a_damaged_stamp_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "stamp.json"
    path.write_text(content)
    assert Stamp.read(path) is None


def write_compiler(folder: Path, name: str, exit_code: int) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.skipif(os.name == "nt", reason="the stand-in compilers are shell scripts")
class TestFindCompiler:
    def test_none_on_an_empty_path(self, tmp_path: Path) -> None:
        assert environment.find_compiler({"PATH": str(tmp_path)}) is None

    def test_the_first_on_the_path_that_works(self, tmp_path: Path) -> None:
        write_compiler(tmp_path, "cc", 1)  # there, but without headers
        clang = write_compiler(tmp_path, "clang", 0)
        assert environment.find_compiler({"PATH": str(tmp_path)}) == str(clang)

    def test_cc_wins_with_its_options(self, tmp_path: Path) -> None:
        write_compiler(tmp_path, "gcc", 0)
        mine = write_compiler(tmp_path, "mine", 0)
        environ = {"PATH": str(tmp_path), "CC": f"{mine} -O2"}
        assert environment.find_compiler(environ) == str(mine)

    def test_a_cc_that_does_not_exist_means_none(self, tmp_path: Path) -> None:
        write_compiler(tmp_path, "gcc", 0)
        environ = {"PATH": str(tmp_path), "CC": "/nonexistent"}
        assert environment.find_compiler(environ) is None


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting numpy>=1.26 (from martlet)\n", "looking for numpy>=1.26 (from martlet)"),
        ("  Downloading a-1.0.whl (2.1 MB)\n", "downloading a-1.0.whl (2.1 MB)"),
        ("Requirement already satisfied: pip\n", None),
        ("\n", None),
        (
            "  [3/25] Building C object CMakeFiles/kernels_avx2.dir/kernels.c.o",
            "compiling C [3/25]",
        ),
    ],
)
def test_pip_s_output_becomes_steps(line: str, step: str | None) -> None:
    assert environment.pip_step(line) == step


def test_the_whole_log_is_kept_and_its_error_quoted(tmp_path: Path) -> None:
    log_path = tmp_path / "install.log"
    code = "print('ERROR: no matching thing'); print('after'); raise SystemExit(3)"
    with open(log_path, "w") as log:
        assert environment.run_logged([sys.executable, "-c", code], os.environ, log) == 3
    assert log_path.read_text().splitlines() == ["ERROR: no matching thing", "after"]
    assert environment.last_error(log_path) == "ERROR: no matching thing"


def test_help_needs_no_installation() -> None:
    done = subprocess.run([sys.executable, str(START), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--once" in done.stdout
