"""Where the time of a run's steps goes, as stored in its directory. Imports no torch."""

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
Mark = tuple[float, str]  # when a phase begins, and its name; one that is not of PHASES is left out


@dataclass(frozen=True)
class StepTimes:
    """Times of one start of a run.

    Args:
        startup_seconds: from the start of the process to the first batch.
        world_size: number of ranks.
        on_cuda: whether memory is the device's; else it is that of a rank's process on the host.
        peak_bytes: the most memory of any rank.
        trained_steps: optimizer steps of this start.
        saving_seconds: of all these steps, for which training waited for checkpoints; the mean over ranks.
        measured_steps: optimizer steps over which the phases were measured.
        seconds: of a measured step, by phase; the mean over ranks. Communication is here what nothing else went on
            beside; the other phases are without it.
        overlapped_seconds: of a measured step, by phase: communication beside that phase's computation.
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
        """Seconds that saves take of each step, spread over all of them."""
        return self.saving_seconds / self.trained_steps if self.trained_steps else 0.0


def write(run_dir: Path, times: StepTimes) -> None:
    """Write the times to step_times.json."""
    regular_files.write_json(run_dir / FILE, asdict(times))


def read(run_dir: Path) -> StepTimes | None:
    """Read the times; None if there are none, or the file is damaged."""
    try:
        found = regular_files.read_record(run_dir / FILE, StepTimes)
    except (OSError, ValueError):
        return None
    seconds = (found.startup_seconds, found.saving_seconds, *found.seconds.values(), *found.overlapped_seconds.values())
    return found if all(0 <= one < _LONGEST_SECONDS for one in seconds) else None


def split(
    marks: Sequence[Mark], communication: Iterable[Interval], computation: Iterable[Interval]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds by phase, and by phase the seconds of communication beside computation.

    Args:
        marks: in order of time; the last one only ends the phase before.
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
    """Return the intervals in order of time, those that overlap as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the time in intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def _within(intervals: list[Interval], start: float, end: float) -> list[Interval]:
    return [(max(one, start), min(other, end)) for one, other in intervals if one < end and other > start]
