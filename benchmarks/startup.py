"""CPU time of a typo's answer and of --help, against the same train.py with its heavy imports at the top.

python -m benchmarks.startup
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import Row, interleaved, options, publish, row

CHECKOUT = Path(__file__).parents[1]
QUESTIONS = {"strategy=fdsp": "≤ 0.10", "trainer.max_stps=1": "≤ 0.10", "--help": "≤ 0.15"}

# What train.py and the code that it imports later need, imported first.
EAGER = """
import runpy, sys
import torch, torchmetrics, lightning.pytorch
from lightswitch.launch import build, report, resume, run_directory, stages
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    given = options("startup", __doc__.splitlines()[0])
    publish(
        [answer(question, 1 if given.quick else 9) for question in list(QUESTIONS)[: 1 if given.quick else None]],
        given,
        per="a start",
    )


def answer(question: str, rounds: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            question: _start([str(CHECKOUT / "train.py"), question], folder),
            "eager imports": _start(["-c", EAGER, str(CHECKOUT / "train.py"), question], folder),
        }
        return row(question, "eager imports", interleaved(contenders, rounds), QUESTIONS[question])


def _start(arguments: list[str], folder: str) -> Callable[[], float]:
    def cpu_seconds() -> float:
        before = _children_seconds()
        subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, check=False)
        return _children_seconds() - before

    return cpu_seconds


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
