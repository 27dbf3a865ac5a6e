"""Every way over the devices that are there: the loss curve of a single device, and from each to each other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.engine.conftest import Finished, runs_in
from tests.engine.curves import largest_difference
from tests.engine.gpu.cells import Cell, Piece, Result, Scale
from tests.engine.tables.resume import END, RUN, SAVED, difference
from tests.engine.tiny import LANGUAGE, NO_CHECKPOINTS
from tests.engine.ways import WAYS, Way

ON_ONE = {name: Way((f"strategy={name}",), 1) for name in ("ddp", "fsdp", "fsdp_offload")}
ALL = WAYS | {f"{name} × 1": way for name, way in ON_ONE.items()}
TINY = ("single", "ddp × 2")
ALONE = "single"
# At 32-true, over 50 steps. GPUs add in another order for each shape of a batch, and so differ by more than CPUs do.
LARGEST = {"cpu": 1e-5, "gpu": 1e-4}

Under = Callable[..., Finished]


def there(scale: Scale) -> dict[str, Way]:
    """Return the ways by name, `single` first."""
    found = {name: way for name, way in ALL.items() if needed(way) <= scale.devices}
    return {name: way for name, way in found.items() if not scale.is_tiny or name in TINY}


def needed(way: Way) -> int:
    """Return how many devices a way needs: ddp_spawn starts its ranks itself."""
    return way.ranks or 2


def parity(scale: Scale) -> Piece:
    """Return a cell for each way; those that need more devices are not run."""
    cells = [Cell(name, partial(_compared, scale, name)) for name in there(scale) if name != ALONE]
    more = {name: needed(way) for name, way in WAYS.items() if needed(way) > scale.devices and not scale.is_tiny}
    return Piece("parity", [*cells, *(Cell(name, _never, f"needs {n} GPUs") for name, n in more.items())], at_once=2)


def _compared(scale: Scale, name: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    under, most = _under(scale, folder, seconds), LARGEST[scale.accelerator]
    run = (*LANGUAGE, *NO_CHECKPOINTS)
    alone = under(ALONE, *run)
    found = largest_difference(under(name, *run), alone)
    return Result({"largest_difference": found}, "" if found <= most else f"differs by {found:.1e}, more than {most}")


def _under(scale: Scale, folder: Path, seconds: float) -> Under:
    """Return what trains in a folder, within so many seconds from now, by the name of a way."""
    train, end = runs_in(folder), time.monotonic() + seconds

    def under(name: str, *run: str, saved: Path | None = None) -> Finished:
        way, seconds_left = ALL[name], int(end - time.monotonic())
        words = (*run, *way.switches, f"trainer.accelerator={scale.accelerator}")
        return train(*words, ranks=way.ranks, folder=saved, timeout_seconds=seconds_left)

    return under


def _never(folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    raise AssertionError("it lacks something")


def resume(scale: Scale) -> Piece:
    """Return a cell for each way that saves: all others go on from there, so that it is run once."""
    cells = [Cell(f"from {name}", partial(_row, scale, name), limit_seconds=480) for name in there(scale)]
    return Piece("resume", cells, at_once=2)


def _row(scale: Scale, before: str, folder: Path, seconds: float, so_far: Mapping[str, Result]) -> Result:
    under, most = _under(scale, folder, seconds), LARGEST[scale.accelerator]
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
