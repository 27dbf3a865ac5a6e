"""CPU time of plans of a model of 7 B parameters, and of a dry run of 1,024 ranks, against their limits.

Only the dependencies of a run are importable, because torchmetrics imports SciPy and transformers if they are
installed.

python -m benchmarks.plan
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import dependencies
from benchmarks.results import Row, options, publish, row

CHECKOUT = Path(__file__).parents[1]
RUN = ("data=python_source", "precision=bf16-mixed", "plan.device=h100")
PLAN = ("mode=plan", "model=gpt_7b", "trainer.num_nodes=4", "trainer.devices=8")
DRY_RUN = ("mode=dry_run", "model=gpt2_xl", "trainer.num_nodes=128", "trainer.devices=8", "strategy=fsdp_hybrid")
TASKS = {
    "7 B on 32 devices, one strategy": (10, (*PLAN, "strategy=fsdp", "micro_batch_size=1", "global_batch_size=32")),
    "7 B on 32 devices, all strategies": (30, PLAN),
    "1.6 B, a dry run of two of 1,024 ranks": (
        25,
        (*DRY_RUN, "dry_run.rank=517", "global_batch_size=1024", "trainer.limit_val_batches=0"),
    ),
}
QUICK = {"two layers on one device": (15, ("mode=plan", "model=gpt2", "model.layers=2", "strategy=single"))}
MOST_GIB = 2


def main() -> None:
    given = options("plan", __doc__.splitlines()[0])
    tasks, rounds = (QUICK, 1) if given.quick else (TASKS, 3)
    rows = [_against_limit(name, seconds, words, rounds) for name, (seconds, words) in tasks.items()]
    publish(rows, given, per="a run")
    gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # of the largest process; in KiB on Linux
    print(f"at most {gib:.2f} GiB of host memory")
    assert gib < MOST_GIB


def _against_limit(name: str, seconds: int, words: tuple[str, ...], rounds: int) -> Row:
    limit = f"{seconds} s"
    taken = [_cpu_seconds(words) for _ in range(rounds)]
    return row(name, limit, {name: taken, limit: [float(seconds)] * rounds}, "≤ 1.0")


def _cpu_seconds(words: tuple[str, ...]) -> float:
    before = _children_seconds()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as needed:
        dependencies.link_into(Path(needed))
        path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "src"), needed])
        environ = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}  # as for users: compiled once
        command = [sys.executable, "-S", str(CHECKOUT / "train.py"), *words, *RUN]
        subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=True)
    return _children_seconds() - before


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
