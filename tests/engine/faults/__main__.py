"""Runs that meet a fault at one of their file operations, and are started again: they end as if nothing had been.

python -m tests.engine.faults fsdp:kill:meet:30          # 30 of some 800 operations of two processes
python -m tests.engine.faults single:ENOSPC:miss:0 ddp:tear:stop:9 --seed 3   # every operation; and nine
python -m tests.engine.faults single:EIO:meet:symlink      # every symbolic link
python -m tests.engine.faults single:lacks:meet:both       # a disk without symbolic links and syncs of directories
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLAIN = ("model._target_=tests.engine.plain.PlainModel", "data._target_=tests.engine.plain.PlainData")
RUN = (*PLAIN, "run_id=mine", "trainer.accelerator=cpu", "global_batch_size=24", "trainer.log_every_n_steps=1")
# 9 steps an epoch. In the first, validations and saves meet the last step; in the second neither does, and the last
# epoch is whole; in the third the run stops early, at a step of its own
CADENCES = {
    "meet": ("trainer.max_steps=8", "trainer.val_check_interval=4", "callbacks.last_checkpoint.every_n_steps=4"),
    "miss": ("trainer.max_epochs=1", "trainer.val_check_interval=4", "callbacks.last_checkpoint.every_n_steps=5"),
    "stop": (
        *("trainer.max_steps=30", "trainer.val_check_interval=3", "callbacks.last_checkpoint.every_n_steps=5"),
        *("callbacks=[default,early_stopping]", "callbacks.early_stopping.stopping_threshold=0.6"),
    ),
}
WAYS = {
    "single": (("strategy=single",), 0),
    "ddp": (("strategy=ddp",), 2),
    "fsdp": (("strategy=fsdp",), 2),
    "deepspeed": (("strategy=deepspeed_stage_3",), 2),
}
ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES")
MEASURED = re.compile(r"throughput/|memory/|lr-")  # columns that differ from start to start
LEFT = re.compile(r".*(\.partial|\.previous|\.tmp)(_\d+)?")


@dataclass
class Ended:
    """What a run leaves, as far as it must not depend on how often it was started."""

    rows: list[dict[str, str]]
    results: dict[str, float]
    tensors: dict[str, dict[str, Any]] = field(repr=False)  # of best and last, by name
    checkpoints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def difference(self, other: Ended) -> str | None:
        import torch

        if self.left:
            return f"left behind: {', '.join(self.left)}"
        if self.checkpoints != other.checkpoints:
            return f"checkpoints are {self.checkpoints}, not {other.checkpoints}"
        if self.rows != other.rows:
            differing = [(a, b) for a, b in zip(self.rows, other.rows, strict=False) if a != b]
            return f"metrics.csv has {len(self.rows)} rows, not {len(other.rows)}; first difference {differing[:1]}"
        if self.results != other.results:
            return f"results.json is {self.results}, not {other.results}"
        for name, tensors in self.tensors.items():
            for key, value in tensors.items():
                if not torch.equal(value, other.tensors[name][key]):
                    return f"{name}.ckpt has another {key}"
        return None


def ended(run_dir: Path) -> Ended:
    """Read what a run has left."""
    import csv

    from lightswitch.checkpoints.reading import Reader

    with (run_dir / "metrics.csv").open() as file:
        rows = [{name: text for name, text in row.items() if not MEASURED.match(name)} for row in csv.DictReader(file)]
    checkpoints = run_dir / "checkpoints"
    tensors = {}
    for name in ("best", "last"):
        tensors[name] = Reader(checkpoints / f"{name}.ckpt", group=None).read_weights()
    found = sorted(path.relative_to(run_dir) for path in run_dir.rglob("*"))
    return Ended(
        rows,
        json.loads((run_dir / "results.json").read_text()),
        tensors,
        sorted(path.name for path in checkpoints.iterdir()),
        [str(path) for path in found if LEFT.fullmatch(path.name)],
    )


def meet(way: str, how: str, points: str, seed: int, cadence: str, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each operation at which a run met a fault, and what then differs from a run that met none.

    Args:
        how: "kill", "tear", the name of an error, or "lacks".
        points: what the disk lacks, see inject.c; else how many operations, drawn at random, 0 for all; or the name
            of one, "symlink", for all of its kind.
        folder: for the runs, empty.
    """
    from tests.runs import runs_in

    switches, ranks = WAYS[way]
    arguments = (*RUN, *CADENCES[cadence], *switches)
    train = runs_in(folder)
    drawn = random.Random(f"{seed} {way} {how} {cadence}")
    log, where = folder / "operations", folder / "whole"
    seen = {"FAULT_UNDER": f"{where}/runs", "FAULT_LOG": str(log)}
    whole = ended(train(*arguments, ranks=ranks, folder=where, environment=seen).run_dir)
    if how == "lacks":
        lacking = {"FAULT_UNDER": f"{folder}/lacking/runs", "FAULT_LACKS": points}
        at = {"ranks": ranks, "folder": folder / "lacking", "environment": lacking, "check": False}
        ran = train(*arguments, **at)
        differs = ended(ran.run_dir).difference(whole) if ran.returncode == 0 else ran.err[-600:]
        tested = train(*arguments, "mode=test", "ckpt_path=last", **at)
        yield (
            f"{way}, {cadence}: a disk without {points}",
            differs or (tested.err[-600:] if tested.returncode else None),
        )
        return
    logged = log.read_text().splitlines() if log.exists() else []
    for rank in range(max(1, ranks)):
        operations = [line.partition(" ")[2] for line in logged if line.startswith(f"{rank} ")]
        some: Sequence[int] = [index for index, line in enumerate(operations) if points in ("0", line.split()[1])]
        if points.isdecimal() and 0 < int(points) < len(operations):
            some = sorted(drawn.sample(range(len(operations)), max(1, int(points) // max(1, ranks))))
        for index in some:
            where = folder / f"{rank}_{index}"
            fault = {"FAULT_UNDER": f"{where}/runs", "FAULT_RANK": str(rank), "FAULT_AT": str(index + 1)}
            fault["FAULT_HOW"] = how if how in ("kill", "tear") else str(getattr(errno, how))
            met = train(*arguments, ranks=ranks, folder=where, environment=fault, check=False)
            last = met
            if met.returncode != 0:
                last = train(*arguments, ranks=ranks, folder=where, check=False)
            told = f"{way}, {cadence}: {how} on rank {rank} at {operations[index].replace(str(folder), '')}"
            if last.returncode != 0:
                yield told, f"started again, it ends with {last.returncode}: {last.err[-600:]}"
                continue
            try:
                found = ended(last.run_dir)
                if how in ERRORS and operations[index].split()[1] in ("unlink", "rmdir"):
                    found.left.clear()  # what the disk refused to remove stays until the next start
                if met.returncode == 0 and {"best.ckpt", "last.ckpt"} < {*found.checkpoints} < {*whole.checkpoints}:
                    found.checkpoints = whole.checkpoints  # the run has gone on without one that could not be written
                yield told, found.difference(whole)
            except Exception as error:
                yield told, f"{type(error).__name__}: {error}"


def library() -> Path:
    """Return inject.so, compiled where that has not been done yet."""
    made = (
        Path(tempfile.gettempdir()) / f"lightswitch_inject_{os.getuid()}_{int((HERE / 'inject.c').stat().st_mtime)}.so"
    )
    if not made.exists():
        beside = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", beside, HERE / "inject.c", "-ldl"], check=True)
        beside.rename(made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "faults",
        nargs="+",
        metavar="WAY:HOW:CADENCE:POINTS",
        help=f"{', '.join(WAYS)}; kill, tear, lacks, {', '.join(ERRORS)}; {', '.join(CADENCES)}; how many "
        "operations, 0: all, or the name of one",
    )
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:  # the fork server of the runs is to have it
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": str(library())})
    count, failed = 0, 0
    for way, how, cadence, points in (fault.split(":") for fault in asked.faults):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for told, difference in meet(way, how, points, asked.seed, cadence, Path(folder)):
                count += 1
                if difference is not None:
                    failed += 1
                    print(f"{told}\n    {difference}", flush=True)
    print(f"{count} faults, {failed} runs differ (seed {asked.seed})")
    return int(failed > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
