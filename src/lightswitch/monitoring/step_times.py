"""Times of a run's training steps by phase, stored in its directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from lightswitch import regular_files

FILE = "step_times.json"
PHASES = ("data", "forward", "backward", "communication", "optimizer", "rest")

Interval = tuple[float, float]  # start and end, in seconds
Mark = tuple[float, str]  # start of a phase, and its name; names outside of PHASES are not counted


@dataclass(frozen=True)
class StepTimes:
    """Times of one start of a run; the mean over ranks.

    Args:
        startup_seconds: from the start of the process to the first batch, on rank 0.
        world_size: number of ranks.
        peak_bytes: peak memory of a device or, on CPUs, of a process; the maximum over ranks.
        trained_steps: optimizer steps of this start.
        saving_seconds: time for which training waited for checkpoints, per trained step.
        measured_steps: optimizer steps over which the phases were measured.
        seconds: time of a measured step, by phase. Communication counts here only while nothing is computed; the other
            phases exclude it.
        overlapped_seconds: communication in a measured step that overlaps with computation.
    """

    startup_seconds: float
    world_size: int
    peak_bytes: int
    trained_steps: int
    saving_seconds: float
    measured_steps: int
    seconds: dict[str, float]
    overlapped_seconds: float


def write(run_dir: Path, times: StepTimes) -> None:
    """Write the times to step_times.json."""
    regular_files.write_json(run_dir / FILE, asdict(times))


def read(run_dir: Path) -> StepTimes | None:
    """Read the times; None if the file is missing, damaged, or of an earlier version."""
    try:
        return regular_files.read_record(run_dir / FILE, StepTimes)
    except (OSError, ValueError):
        return None


def split(
    marks: Sequence[Mark], communication: Iterable[Interval], computation: Iterable[Interval]
) -> tuple[dict[str, float], float]:
    """Return the seconds by phase, and the seconds of communication that overlap with computation.

    Args:
        marks: in chronological order; the last one only ends the phase before it.
    """
    seconds, overlapped = dict.fromkeys(PHASES, 0.0), 0.0
    communication, computation = list(communication), list(computation)
    for (start, phase), (end, _) in pairwise(marks):
        if phase not in seconds:
            continue
        computes = covered(computation, start, end)
        exposed = covered([*communication, *computation], start, end) - computes  # |A \ B| = |A or B| - |B|
        seconds["communication"] += exposed
        seconds[phase] += end - start - exposed
        overlapped += covered(communication, start, end) - exposed
    return seconds, overlapped


def covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Return the time between a start and an end that any of the intervals covers."""
    total, until = 0.0, start
    for first, last in sorted(intervals):
        total += max(0.0, min(last, end) - max(first, until))
        until = max(until, min(last, end))
    return total
