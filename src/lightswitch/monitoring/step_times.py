"""Times of a run's training steps by phase, stored in its directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from lightswitch import regular_files

FILE = "step_times.json"
PHASES = ("data", "forward", "backward", "communication", "optimizer", "rest")
_LONGEST_SECONDS = 1e9

Interval = tuple[float, float]  # start and end, in seconds
Mark = tuple[float, str]  # start of a phase, and its name; names outside of PHASES are not counted


@dataclass(frozen=True)
class StepTimes:
    """Times of one start of a run.

    Args:
        startup_seconds: from the start of the process to the first batch.
        world_size: number of ranks.
        on_cuda: whether the memory is that of the device; if false, it is a rank's process memory on the host.
        peak_bytes: peak memory, the maximum over ranks.
        trained_steps: optimizer steps of this start.
        saving_seconds: time for which training waited for checkpoints, in all steps; the mean over ranks.
        measured_steps: optimizer steps over which the phases were measured.
        seconds: time of a measured step, by phase; the mean over ranks. Communication counts here only while nothing is
            computed; the other phases exclude it.
        overlapped_seconds: communication in a measured step that overlaps with computation, by phase.
    """

    startup_seconds: float
    world_size: int
    on_cuda: bool
    peak_bytes: int
    trained_steps: int
    saving_seconds: float
    measured_steps: int
    seconds: dict[str, float]
    overlapped_seconds: dict[str, float]

    @property
    def saving_seconds_a_step(self) -> float:
        """Time for which training waited for checkpoints, in seconds per trained step."""
        return self.saving_seconds / self.trained_steps if self.trained_steps else 0.0


def write(run_dir: Path, times: StepTimes) -> None:
    """Write the times to step_times.json."""
    regular_files.write_json(run_dir / FILE, asdict(times))


def read(run_dir: Path) -> StepTimes | None:
    """Read the times; None if the file is missing or damaged."""
    try:
        found = regular_files.read_record(run_dir / FILE, StepTimes)
    except (OSError, ValueError):
        return None
    seconds = (found.startup_seconds, found.saving_seconds, *found.seconds.values(), *found.overlapped_seconds.values())
    return found if all(0 <= one < _LONGEST_SECONDS for one in seconds) else None


def split(
    marks: Sequence[Mark], communication: Iterable[Interval], computation: Iterable[Interval]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds by phase, and the seconds of communication that overlaps with computation, by phase.

    Args:
        marks: in chronological order; the last one only ends the phase before it.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    overlapped = dict.fromkeys(PHASES, 0.0)
    talking, computing = merged(communication), merged(computation)
    for (start, phase), (end, _) in pairwise(marks):
        if phase not in seconds:
            continue
        talks, computes = _within(talking, start, end), _within(computing, start, end)
        exposed = length(merged([*talks, *computes])) - length(computes)  # |A \ B| = |A or B| - |B|
        seconds["communication"] += exposed
        seconds[phase] += end - start - exposed
        overlapped[phase] += length(talks) - exposed
    return seconds, {phase: total for phase, total in overlapped.items() if total > 0}


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in chronological order, with overlapping ones merged."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def _within(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    return [(max(one, start), min(other, end)) for one, other in intervals if one < end and other > start]
