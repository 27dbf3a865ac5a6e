"""What has to hold on GPUs: tests, strategies and precisions, the same losses on any devices, resumes, failures."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from tests.engine.conftest import CHECKOUT, Finished, runs_in
from tests.engine.gpu.cells import Cell, Lacking, Piece, Result, Scale, run
from tests.engine.tables.failures import CASES, LAUNCHERS, local
from tests.engine.tables.failures import Cell as Seen
from tests.engine.tables.matrix import PRECISIONS, STRATEGIES, cell
from tests.engine.tables.resume import END, RUN, SAVED, difference
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import WAYS, Way
from tests.runs import largest_difference

# The tests that need a GPU, a file a cell

TINY_TESTS = ("tests/engine/strategies/test_single.py",)
MOST_WORKERS = 6


def tests(scale: Scale) -> Piece:
    """Return a cell for each file that has tests for GPUs."""
    found = sorted(path for path in (CHECKOUT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    files = [str(path.relative_to(CHECKOUT)) for path in found]
    chosen = [file for file in files if not scale.is_tiny or file in TINY_TESTS]
    return Piece("tests", [Cell(file, partial(tested, file), limit_seconds=480) for file in chosen], at_once=2)


def tested(file: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    """Run the tests of a file that are marked gpu; return how many passed, and what those that failed say."""
    report = folder / "report.xml"
    without = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the second warns of other processes: an error here
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *without, f"--junitxml={report}"]
    workers = f"--numprocesses={min(MOST_WORKERS, (os.cpu_count() or 1) // 2)}"  # runs of some seconds share the card
    finished = run([*command, workers, file], folder, seconds, cwd=CHECKOUT)
    if not report.exists():
        return Result({}, f"pytest ended with {finished.returncode}: {(finished.stderr or finished.stdout)[-500:]}")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = {str(case.get("name")): told for case in cases if (told := _failure(case)) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    found = {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": [*bad]}
    return Result(found, "; ".join(f"{name} failed: {told}" for name, told in bad.items()))


def _failure(case: ElementTree.Element) -> str | None:
    """Return the first lines of what pytest says of a test that failed; None where it did not."""
    kinds = (case.find(kind) for kind in ("failure", "error"))
    told = next((one for one in kinds if one is not None), None)
    return None if told is None else " ".join(str(told.get("message")).split())[:1000]


# Every strategy at every precision, against what is expected of it

TRAINS = "trains"
TINY_MATRIX = {"single": ("32-true", "16-mixed"), "fsdp": ("bf16-mixed", "16-mixed")}


def expected(strategy: str, precision: str, devices: int) -> str:
    """Return what a strategy does at a precision on so many GPUs: "trains", or the line by which it is refused."""
    if strategy == "single" and devices > 1:
        return f"strategy=single uses one device, but 1 × {devices} are requested; use strategy=ddp"
    if strategy == "fsdp_tp" and precision == "16-true":
        return "strategy=fsdp_tp steps float16 weights in float16, which loses Adam's moments; use precision=bf16-true"
    if strategy == "fsdp_tp" and devices % 2:
        return (
            f"trainer.strategy.tensor_parallel_size=2 does not divide 1 × {devices} devices; use trainer.devices=2 or "
            "a multiple of it"
        )
    if strategy == "fsdp_hybrid" and devices % 2:
        return f"trainer.strategy.shard_size=2 does not divide {devices} devices; use one of 1"
    if strategy.startswith("deepspeed") and precision == "64-true":
        return "precision=64-true is not for DeepSpeed; use strategy=ddp, or another precision"
    return TRAINS


def matrix(scale: Scale) -> Piece:
    """Return a cell for each strategy, precision and number of devices."""
    rows = TINY_MATRIX if scale.is_tiny else dict.fromkeys(STRATEGIES, PRECISIONS)
    cells = [
        _of_matrix(scale, strategy, precision, devices)
        for devices in scale.device_counts
        for strategy, precisions in rows.items()
        for precision in precisions
    ]
    return Piece("matrix", cells, at_once=2 if scale.is_tiny else 8)


def _of_matrix(scale: Scale, strategy: str, precision: str, devices: int) -> Cell:
    wanted = expected(strategy, precision, devices)
    if scale.accelerator == "cpu" and precision == "16-mixed" and wanted == TRAINS:
        wanted = "precision=16-mixed is for GPUs, and Lightning would put bf16-mixed in its place; use that on the CPU"

    def run(folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
        found = cell(runs_in(folder), scale.accelerator, strategy, precision, devices, int(seconds))
        if "which is not built here" in found:
            raise Lacking(found)
        return Result({"outcome": found}, "" if found == wanted else f"found {found!r}, expected {wanted!r}")

    return Cell(f"{strategy} at {precision} × {devices}", run)


# Every way over the devices that are there: the loss curve of a single device, and from each to each other

ON_ONE = {name: Way((f"strategy={name}",), 1) for name in ("ddp", "fsdp", "fsdp_offload")}
ALL = WAYS | {f"{name} × 1": way for name, way in ON_ONE.items()}
TINY_WAYS = ("single", "ddp × 2")
ALONE = "single"
# At 32-true, over 50 steps. GPUs add in another order for each shape of a batch, and so differ by more than CPUs do.
LARGEST = {"cpu": 1e-5, "gpu": 1e-4}

Under = Callable[..., Finished]


def there(scale: Scale) -> dict[str, Way]:
    """Return the ways by name, `single` first."""
    found = {name: way for name, way in ALL.items() if needed(way) <= scale.devices}
    return {name: way for name, way in found.items() if not scale.is_tiny or name in TINY_WAYS}


def needed(way: Way) -> int:
    """Return how many devices a way needs: ddp_spawn starts its ranks itself."""
    return way.ranks or 2


def parity(scale: Scale) -> Piece:
    """Return a cell for each way; those that need more devices are not run."""
    cells = [Cell(name, partial(_compared, scale, name)) for name in there(scale) if name != ALONE]
    more = {name: needed(way) for name, way in WAYS.items() if needed(way) > scale.devices and not scale.is_tiny}
    return Piece("parity", [*cells, *(Cell(name, _never, f"needs {n} GPUs") for name, n in more.items())], at_once=2)


def _compared(scale: Scale, name: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    return compared(scale, under_ways(scale, folder, seconds), name)


def compared(scale: Scale, under: Under, name: str) -> Result:
    """Return how far the losses of a way are from those of a single device."""
    run = (*LANGUAGE, *NO_CHECKPOINTS)
    alone = under(ALONE, *run)
    return judged_difference(scale, largest_difference(under(name, *run), alone))


def judged_difference(scale: Scale, found: float) -> Result:
    """Return a difference, and whether it is more than rounding."""
    most = LARGEST[scale.accelerator]
    return Result({"largest_difference": found}, "" if found <= most else f"differs by {found:.1e}, more than {most}")


def under_ways(
    scale: Scale, folder: Path, seconds: float, ways: Mapping[str, Way] = ALL, each_a_node: bool = False
) -> Under:
    """Return what trains in a folder, within so many seconds from now, by the name of a way."""
    train, end = runs_in(folder, each_a_node=each_a_node), time.monotonic() + seconds

    def under(name: str, *run: str, saved: Path | None = None) -> Finished:
        way, seconds_left = ways[name], int(end - time.monotonic())
        words = (*run, *way.switches, f"trainer.accelerator={scale.accelerator}")
        ranks = 0 if each_a_node and way.ranks == 1 else way.ranks  # a run of one process is no node among others
        return train(*words, ranks=ranks, folder=saved, timeout_seconds=seconds_left)

    return under


def _never(folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    raise AssertionError("it lacks something")


def resume(scale: Scale) -> Piece:
    """Return a cell for each way that saves: all others go on from there, so that it is run once."""
    cells = [Cell(f"from {name}", partial(_row, scale, name), limit_seconds=480) for name in there(scale)]
    return Piece("resume", cells, at_once=2)


def _row(scale: Scale, before: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    under, most = under_ways(scale, folder, seconds), LARGEST[scale.accelerator]
    to_the_end = (*RUN, f"trainer.max_steps={END}")
    uninterrupted = under(ALONE, *to_the_end)
    begun = under(before, *RUN, f"trainer.max_steps={SAVED}", saved=folder / "begun")
    found = {}
    for number, name in enumerate(there(scale)):
        again = folder / f"again_{number}"
        shutil.copytree(begun.folder, again)
        found[name] = difference(uninterrupted, under(name, *to_the_end, saved=again))
    wrong = [f"{name} by {value:.1e}" for name, value in found.items() if not value <= most]
    return Result(found, f"more than {most} off: {', '.join(wrong)}" if wrong else "")


# What a user sees of failures between ranks that wait for one another in NCCL

MOST_SECONDS = 60.0  # from the failure until no process is left
# by the name of the case: the first line that the user reads; the exit code is torchrun's own under it
LINES = {
    "an exception in rank 1": r"rank 1 of 2 on node failed: RuntimeError: this is the bug",
    "`kill -9` of rank 1": r"rank 1 of 2 on node failed: process \d+ (was killed|ended without an error message)",
    "rank 1 hangs (given up after 5 s)": r"rank 1 of 2 on node hangs at tests/engine/failures/failing\.py",
    "the disk of rank 1 is full when it saves": r"error: the checkpoint could not be written: rank 1: ",
}
CODES = {"the disk of rank 1 is full when it saves": {"python": "2", "torchrun": "1"}}


def failures(scale: Scale) -> Piece:
    """Return a cell for each failure under each launcher."""
    lacks = "" if scale.devices > 1 else "needs 2 GPUs"
    pairs = [(case, launcher) for case in LINES for launcher in ("python", "torchrun")]
    chosen = pairs[:1] if scale.is_tiny else pairs
    return Piece("failures", [Cell(f"{case}: {by}", partial(_seen, scale, case, by), lacks) for case, by in chosen])


def _seen(scale: Scale, name: str, launcher: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    case = replace(CASES[name], arguments=(*CASES[name].arguments, f"trainer.accelerator={scale.accelerator}"))
    return judged(name, launcher, local(case, LAUNCHERS[launcher], folder / "run", seconds))


def judged(name: str, launcher: str, cell: Seen) -> Result:
    """Return what was seen of a failure under a launcher, and what of it is not as expected."""
    code = CODES.get(name, {}).get(launcher, "1")
    problems = [
        *([] if re.match(LINES[name], cell.line) else [f"the first line is {cell.line!r}"]),
        *([] if cell.code == code else [f"exit code {cell.code}, expected {code}"]),
        *([] if cell.seconds <= MOST_SECONDS else [f"{cell.seconds:.0f} s until all was gone"]),
    ]
    return Result({"seconds": round(cell.seconds, 1), "code": cell.code, "line": cell.line}, "; ".join(problems))
