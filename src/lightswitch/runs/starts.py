"""Starts of a run: its machines at each start, the step that it resumed from, and the steps that it trained again.

A run may lose machines and gain others; run.json in its directory lists its starts. Imports no torch.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightswitch import regular_files
from lightswitch.errors import listed

_RECORD = "run.json"
_REACHED = ".reached"  # the optimizer step at which the last start failed


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Args:
        step: number of optimizer steps in the checkpoint that it resumes from; 0 without one.
        hosts: machine of each node, in rank order.
        devices: devices of each node, or of the first node if their numbers differ.
        uneven: devices of all nodes, if their numbers differ; else 0.
        trained_twice: steps that the previous start trained after that checkpoint, and that are trained again.
        job: the job whose launcher may start it again, see `claim.job`; empty for a command that someone has typed.
    """

    step: int
    hosts: list[str]
    devices: int
    trained_twice: int = 0
    job: str = ""
    uneven: int = 0

    @property
    def size(self) -> int:
        """Number of devices of all nodes."""
        return self.uneven or len(self.hosts) * self.devices

    @property
    def world(self) -> str:
        """Nodes × devices, such as `4 nodes × 2`."""
        nodes = f"{len(self.hosts)} node{'' if len(self.hosts) == 1 else 's'}"
        return f"{self.uneven} devices on {nodes}" if self.uneven else f"{nodes} × {self.devices}"

    def change_from(self, before: Start) -> str:
        """Return the change of the world since another start, in one line; empty if there is none."""
        lost = [host for host in before.hosts if host not in self.hosts]
        joined = [host for host in self.hosts if host not in before.hosts]
        if self.world == before.world and not (len(self.hosts) > 1 and (lost or joined)):  # one node may have moved
            return ""
        named = [f"{verb} {listed(hosts, 'nodes')}" for verb, hosts in (("lost", lost), ("joined by", joined)) if hosts]
        return f"{before.world} → {self.world} at step {self.step}{': ' if named else ''}{', '.join(named)}"


@dataclass(frozen=True)
class Changes:
    """Changes of a run's world over all of its starts.

    Args:
        steps: steps at which it changed.
        trained_twice: total number of steps that were trained again.
    """

    steps: list[int]
    trained_twice: int


def changes(starts: Sequence[Start]) -> Changes:
    """Return the changes of the world over the starts of a run."""
    pairs = itertools.pairwise(starts)
    return Changes(
        [start.step for before, start in pairs if start.change_from(before)], sum(one.trained_twice for one in starts)
    )


def read(run_dir: Path) -> list[Start]:
    """Return the starts of a run, the first one first; empty if its record has none or can't be read."""
    try:
        found: Any = regular_files.read_json(run_dir / _RECORD)
        return [regular_files.as_record(one, Start) for one in found["starts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def has_saved(run_dir: Path, job: str) -> bool:
    """Return whether the last start in a directory was of a job, and checkpoints are there."""
    is_last = any(start.job == job for start in read(run_dir)[-1:])
    return is_last and any(path.is_dir() for path in (run_dir / "checkpoints").glob("*.ckpt"))


def of_next(run_dir: Path, step: int, hosts: list[str], devices: int) -> Start:
    """Return a start that resumes in a directory from a step, which may precede the last one trained there."""
    reached = _reached(run_dir)
    return Start(step, hosts, devices, max(0, reached - step))


def as_json(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return starts in the format of run.json."""
    return [asdict(start) for start in starts]


def note_reached(run_dir: Path, step: int) -> None:
    """Record in a failed run's directory how far it had trained; each of its ranks may do so."""
    with contextlib.suppress(OSError):  # the run has failed already, and the count is only informative
        if step > _noted(run_dir):
            regular_files.write_text(run_dir / _REACHED, f"{step}\n")


def forget_reached(run_dir: Path) -> None:
    """Remove the record, which the next start has read."""
    (run_dir / _REACHED).unlink(missing_ok=True)


def _reached(run_dir: Path) -> int:
    """Return the last step that was trained: as a rank of a failed run recorded it, or the last one in metrics.csv."""
    return max(_noted(run_dir), _logged(run_dir))


def _noted(run_dir: Path) -> int:
    try:
        return int(regular_files.read_text(run_dir / _REACHED))
    except (OSError, ValueError):
        return 0


def _logged(run_dir: Path) -> int:
    try:
        text = regular_files.read_text(run_dir / "metrics.csv", "replace")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
        return max((int(row["step"]) + 1 for row in rows if row.get("train/loss")), default=0)
    except (OSError, ValueError, KeyError, csv.Error):
        return 0
