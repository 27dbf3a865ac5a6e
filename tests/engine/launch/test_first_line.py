"""The line that train.py shows at once on a terminal: before what takes its time is imported, and only to a reader."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightswitch.launch import entry
from tests.engine.conftest import CHECKOUT
from tests.engine.processes import TRAIN_PY, Start, said, shown_by

TAKES_ITS_TIME = r"\| +(omegaconf|hydra|yaml|numpy|torch|lightning|logging)\b"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environ: str) -> str:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name in entry._RANKS:
        monkeypatch.setenv(name, environ.get(name, "0"))
    entry.show_first_line(arguments)
    return terminal.getvalue()


def test_it_is_on_the_terminal_before_hydra_or_torch_is_imported(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-X", "importtime", str(CHECKOUT / "train.py"), "strategy=fdsp"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = shown_by(controller, lambda text: text.partition("error: ")[2].endswith("\n"))
    process.wait()
    os.close(controller)
    until, line, after = shown.partition(f"process    {process.pid} on {os.uname().nodename} reads the config, then ")
    assert line
    assert "lightswitch.launch.entry" in until
    assert not re.search(TAKES_ITS_TIME, until)
    assert re.search(TAKES_ITS_TIME, after)
    assert "error: strategy=fdsp: there is no such strategy. Did you mean fsdp?" in after


@pytest.mark.parametrize(
    "question", ["--help strategy", "-h", "strategy=ddp --cfg job", "--cfg=job", "--info", "-sc a"]
)
def test_a_question_is_answered_alone(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(monkeypatch, *question.split()) == ""


def test_one_rank_shows_it_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry.show_first_line([])
    assert capsys.readouterr().out == ""
    assert _shown(monkeypatch, "strategy=ddp").count("\n") == 1
    assert [_shown(monkeypatch, **{name: "1"}) for name in entry._RANKS] == [""] * len(entry._RANKS)


HASHES = """
import sys
from lightswitch.launch import entry
entry.show_first_line = lambda words: (print(hash("a name"), words), sys.exit())  # where a start goes on

@entry.entry("conf", "config")
def main(cfg, run): ...

main()
"""


def _hashes(folder: Path, *options: str, script: str = "script.py", **environ: str) -> str:
    (folder / "script.py").write_text(HASHES)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | environ
    command = [sys.executable, *options, script, "strategy=ddp", "a b"]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_hashes_are_fixed_unless_the_user_has_set_them(tmp_path: Path) -> None:
    fixed = _hashes(tmp_path, PYTHONHASHSEED="0")
    assert fixed.endswith(" ['strategy=ddp', 'a b']\n")
    assert _hashes(tmp_path) == _hashes(tmp_path, "-X", "dev") == fixed
    assert _hashes(tmp_path, "-m", script="script") == fixed
    assert _hashes(tmp_path, PYTHONHASHSEED="7") == _hashes(tmp_path, PYTHONHASHSEED="7") != fixed
    assert len({_hashes(tmp_path, PYTHONHASHSEED="random") for _ in range(3)}) == 3
    assert len({_hashes(tmp_path, "-m", "cProfile", "-o", "profile") for _ in range(3)}) == 3  # as a debugger


# Ctrl+C while it imports

# Stand before the packages of these names on Python's path; the first to be imported raises the signal.
SLOW = ("omegaconf", "hydra", "yaml", "torch")
IMPORTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
STOPPED = "stopped    by SIGINT\n"
COMMANDS = {  # what is typed, what is said, and the exit code
    "train.py": ((TRAIN_PY, "seed=1"), "", 130),
    "export": (("-m", "lightswitch.export", ".", "-o", "model.pt"), STOPPED, -signal.SIGINT),
    "compare": (("-m", "lightswitch.compare", "."), STOPPED, -signal.SIGINT),
    "doctor": (("-m", "lightswitch.doctor"), STOPPED, -signal.SIGINT),
}


@pytest.mark.parametrize("typed", COMMANDS)
def test_an_import_is_interrupted_without_a_traceback(typed: str, tmp_path: Path, start: Start) -> None:
    words, told, code = COMMANDS[typed]
    (tmp_path / "first").mkdir()
    for package in SLOW:
        (tmp_path / f"first/{package}.py").write_text(IMPORTED)
    paths = ":".join((str(tmp_path / "first"), *sys.path))
    process = start(sys.executable, *words, PYTHONPATH=paths)
    assert said(process) == told
    assert process.returncode == code
