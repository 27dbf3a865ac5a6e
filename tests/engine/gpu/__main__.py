"""Tests and measurements on GPUs, in pieces: what tests/engine/tables/measured/gpu.md has.

python -m tests.engine.gpu                      # all pieces, or nothing where there is no GPU
python -m tests.engine.gpu matrix               # one of them, for nine minutes: what is left is run the next time
python -m tests.engine.gpu matrix --cells fsdp  # some of its cells
python -m tests.engine.gpu --tiny --results X   # the same path on two processes of a CPU, in a few minutes

Asked for again, what has no result yet is run; once all has one, what was not as expected.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import torch

from tests.engine.conftest import CHECKOUT
from tests.engine.gpu import benchmark, machine, memory, pieces, shared
from tests.engine.gpu.cells import Cell, Lacking, OtherMachine, Piece, Record, Result, Scale, end_children
from tests.engine.tables.gpu import RESULTS

PIECES: dict[str, Callable[[Scale], Piece]] = {
    "tests": pieces.tests,
    "matrix": pieces.matrix,
    "parity": pieces.parity,
    "resume": pieces.resume,
    "failures": pieces.failures,
    "shared": shared.piece,
    "memory": memory.planned,
    "benchmark": benchmark.eager,
    "compiled": benchmark.compiled,
    "parts": benchmark.by_part,
}
PASSED, FAILED, MISTAKEN, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130  # exit codes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.gpu", description="Tests and measurements on GPUs.")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; all of them if none")
    parser.add_argument("--minutes", type=float, help="for all that is asked for; 9 for a piece, else no limit")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file that is added to, or a folder for it")
    parser.add_argument("--cells", type=re.compile, default=re.compile(""), metavar="PATTERN", help="of names of cells")
    parser.add_argument("--tiny", action="store_true", help="try the path on a CPU, with models of no size")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.pieces if name not in PIECES]:
        parser.error(f"no piece {unknown[0]}; use {', '.join(PIECES)}")
    names = given.pieces or list(PIECES)
    if not (given.tiny or torch.cuda.is_available()):
        print(f"no GPU here; not run: {', '.join(names)}. On a machine with one, type make gpu")
        return PASSED
    make_paths_absolute()
    scale = Scale("cpu", 2, True) if given.tiny else Scale("gpu", torch.cuda.device_count(), False)
    try:
        path = given.results / RESULTS.name if given.results.is_dir() else given.results
        record = Record(path, machine.described(scale.gpus), machine.commit())
    except OtherMachine as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKEN
    minutes = given.minutes or (9.0 if given.pieces else float("inf"))
    end = time.monotonic() + 60 * minutes
    try:
        codes = {run(PIECES[name](scale).narrowed(given.cells), record, end) for name in names}
    except KeyboardInterrupt:
        codes = {INTERRUPTED}
    page = "; python -m tests.engine.tables.gpu makes measured/gpu.md of them" if path == RESULTS else ""
    print(f"results: {path}{page}")
    return next(code for code in (INTERRUPTED, FAILED, UNFINISHED, PASSED) if code in codes)


def make_paths_absolute() -> None:
    """Make those of PYTHONPATH so: runs are started in folders of their own."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(CHECKOUT), str(CHECKOUT / "src"), *(str(Path(path).absolute()) for path in given if path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def run(piece: Piece, record: Record, end: float) -> int:
    """Run the cells of a piece that have no good result yet, until a moment of the monotonic clock; return an exit
    code."""
    for cell in piece.cells:
        if cell.lacks:
            record.put_not_run(piece.name, cell.name, cell.lacks)
            print(f"{piece.name}: {cell.name}: not run: {cell.lacks}", flush=True)
    left = _left(piece, record)
    lacking = _run_cells(piece, left, record, end)
    results = record.results(piece.name)
    missing = [cell.name for cell in left if cell.name not in results and cell.name not in lacking]
    problems = [name for name, result in results.items() if result.problem]
    print(f"{piece.name}: {len(results)} run, {len(problems)} not as expected, {len(missing)} left", flush=True)
    if missing:
        print(f"  type the same again to go on with {missing[0]}")
    return FAILED if problems else UNFINISHED if missing else PASSED


def _left(piece: Piece, record: Record) -> list[Cell]:
    """Return the cells without a result; if all have one, those whose result is not as expected."""
    done = record.results(piece.name)
    there = [cell for cell in piece.cells if not cell.lacks]
    return [cell for cell in there if cell.name not in done] or [cell for cell in there if done[cell.name].problem]


def _run_cells(piece: Piece, cells: list[Cell], record: Record, end: float) -> set[str]:
    """Run cells, so many at once, and return those that could not be run; on Ctrl+C, end what runs, keep nothing of it,
    and begin no other."""
    interrupted = Event()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(piece.at_once) as pool:
        running = [
            pool.submit(_run_cell, piece.name, cell, record, Path(folder, str(number)), end, interrupted)
            for number, cell in enumerate(cells)
        ]
        try:
            could = [future.result() for future in running]
            return {cell.name for cell, ran in zip(cells, could, strict=True) if not ran}
        except KeyboardInterrupt:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in running):  # a cell may be about to start a process
                end_children(psutil.Process())  # in sessions of their own, they heard nothing of it
                time.sleep(0.1)
            raise


def _run_cell(piece: str, cell: Cell, record: Record, folder: Path, end: float, interrupted: Event) -> bool:
    """Run a cell, unless there is no time left; one that Ctrl+C cut off is not kept, nor a problem of one that had less
    than its time. Return whether it can be run here."""
    began = time.monotonic()
    limit_seconds = min(cell.limit_seconds, end - began)
    if limit_seconds <= 0:
        return True
    folder.mkdir()
    try:
        result = cell.run(folder, limit_seconds, record.results(piece))
    except Lacking as error:
        record.put_not_run(piece, cell.name, str(error))
        print(f"{piece}: {cell.name}: not run: {error}", flush=True)
        return False
    except Exception as error:  # a bug of the cell's own is a result as well, and the others go on
        result = Result({}, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    is_shortened = limit_seconds < cell.limit_seconds
    if interrupted.is_set() or (is_shortened and (result.problem or seconds >= limit_seconds)):
        return True
    if seconds >= cell.limit_seconds:
        result = Result(result.found, f"took more than {cell.limit_seconds:.0f} s")
    record.put(piece, cell.name, result, seconds)
    told = result.problem or ", ".join(f"{key} {value}" for key, value in result.found.items())
    print(f"{piece}: {cell.name}: {seconds:.0f} s: {told}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
