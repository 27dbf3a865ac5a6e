"""CPU time of a start: to report a typo, to print --help, to the first step, and to the next step after a kill.

The first two are paired with eager imports: the same train.py with its heavy imports at the top.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import dependencies
from benchmarks.results import Row, interleaved, options, publish, row

CHECKOUT = Path(__file__).parents[1]
QUESTIONS = {"strategy=fdsp": "≤ 0.05", "stratgy=fsdp": "≤ 0.05", "--help": "≤ 0.15"}
RESTART, RESTARTED = "train.py from a kill to its next step", "a plain Trainer from a kill to its next step"
FIRST_STEP, BARE, PLAIN, EXTRAS = (
    "train.py to its first step",
    "a plain Trainer to its first step",
    "plain torch to its first step",
    "train.py to its first step, all extras installed",
)

OF = "benchmarks.first_step_lightning"
RUN = [str(CHECKOUT / "train.py"), f"model._target_={OF}.Model", f"data._target_={OF}.Data", "trainer.accelerator=cpu"]

# Import first what train.py and the code that it imports later need.
EAGER = """
import runpy, sys
import torch, torchmetrics, lightning.pytorch
from lightswitch.launch import build, report, stages
from lightswitch.runs import resume
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    given = options("startup", __doc__.splitlines()[0])
    rounds, questions = (1, list(QUESTIONS)[:1]) if given.quick else (9, list(QUESTIONS))
    answers = [answer(question, rounds) for question in questions]
    publish([*answers, *first_step(rounds), restart(rounds)], given, per="a start")


def answer(question: str, rounds: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            question: _start([str(CHECKOUT / "train.py"), question], folder),
            "eager imports": _start(["-c", EAGER, str(CHECKOUT / "train.py"), question], folder),
        }
        return row(question, "eager imports", interleaved(contenders, rounds), QUESTIONS[question])


def first_step(rounds: int) -> list[Row]:
    """Measure from the start of the process to the end of the first step of an MLP.

    Each contender can import only its dependencies, except in one row: with all extras, torchmetrics would import SciPy
    and transformers.
    """
    run = [*RUN, f"callbacks.ends._target_={OF}.EndsAtFirstStep"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as needed:
        dependencies.link_into(Path(needed))
        contenders = {
            FIRST_STEP: _start(["-S", *run], folder, needed),
            BARE: _start(["-S", "-m", OF], folder, needed),
            PLAIN: _start(["-S", "-m", "benchmarks.first_step"], folder, needed),
            EXTRAS: _start(run, folder),
        }
        seconds = interleaved(contenders, rounds)
    return [row(FIRST_STEP, PLAIN, seconds, "≤ 1.10"), row(BARE, PLAIN, seconds), row(EXTRAS, PLAIN, seconds, "≤ 1.3")]


def restart(rounds: int) -> Row:
    """Measure from the start of a process, which finds a checkpoint, to the end of the first step that it trains."""
    with tempfile.TemporaryDirectory() as folder:
        run = [*RUN, "run_id=mine"]
        for arguments in ([*run, "trainer.max_steps=2"], ["-m", OF, "2"]):
            _start(arguments, folder)()
        contenders = {
            RESTART: _start([*run, f"callbacks.ends._target_={OF}.EndsAtFirstStep"], folder),
            RESTARTED: _start(["-m", OF], folder),
        }
        return row(RESTART, RESTARTED, interleaved(contenders, rounds), "≤ 1.0")


def _start(arguments: list[str], folder: str, *paths: str) -> Callable[[], float]:
    path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "src"), *paths])
    # the first start compiles the modules, as a user's does: otherwise each start would do so again
    environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

    def cpu_seconds() -> float:
        before = _children_seconds()
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 2), done.stderr  # 2: a typo was reported
        return _children_seconds() - before

    return cpu_seconds


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
