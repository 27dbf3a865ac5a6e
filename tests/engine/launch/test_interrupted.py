"""Ctrl+C ends what is typed without a traceback, also while it imports what takes its time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.engine.processes import TRAIN_PY, Start, said
from tests.night import at_night

# Stands before the package of the name on Python's path, and raises the signal where that would be imported.
IMPORTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
# Stands before site's own, and raises the signal within torch, whose module of fake tensors logs as Python exits.
WITHIN_TORCH = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if hasattr(sys.modules.get("torch._subclasses.fake_tensor"), "dump_cache_stats"):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
STOPPED = "stopped    by SIGINT\n"
COMMANDS = {  # what is typed, the package that is being imported, what is said, and the exit code
    "train.py": ((TRAIN_PY, "seed=1"), "hydra", "", 130),
    "export": (("-m", "lightswitch.export", ".", "-o", "model.pt"), "omegaconf", STOPPED, -signal.SIGINT),
    "compare": (("-m", "lightswitch.compare", "."), "omegaconf", STOPPED, -signal.SIGINT),
    "doctor": (("-m", "lightswitch.doctor"), "torch", STOPPED, -signal.SIGINT),
}


@pytest.mark.parametrize("typed", ["train.py", "export", *at_night("compare", "doctor")])
def test_an_import_is_interrupted_without_a_traceback(typed: str, tmp_path: Path, start: Start) -> None:
    words, package, told, code = COMMANDS[typed]
    (tmp_path / "first").mkdir()
    (tmp_path / f"first/{package}.py").write_text(IMPORTED)
    paths = ":".join((str(tmp_path / "first"), *sys.path))
    process = start(sys.executable, *words, PYTHONPATH=paths)
    assert said(process) == told
    assert process.returncode == code


def test_torch_that_is_interrupted_adds_no_lines_of_its_own(tmp_path: Path, start: Start) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHIN_TORCH)
    process = start(sys.executable, TRAIN_PY, "run_id=mine", PYTHONPATH=":".join((str(tmp_path), *sys.path)))
    stopped, go_on = said(process).splitlines()
    assert f"{stopped}\n" == STOPPED
    assert go_on.endswith("train.py run_id=mine")
    assert process.returncode == 130
