"""Read a run, finished or not, from its directory."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lightswitch.errors import Refused, shown
from lightswitch.monitoring import objective
from lightswitch.runs import resume
from lightswitch.sweeps import record
from lightswitch.sweeps.record import FAILED, FINISHED, RUNNING, Record

Curve = dict[int, float]  # values by step, counted from 0

_CALL = re.compile(r"\$\{(?!hydra:)\w+:")  # of a resolver, whose value may differ between runs
_NOT_VALUES = ("samples", "epoch", "world")


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        label: short text that distinguishes it from the other runs.
        state: finished, not finished, stopped, or failed.
        failure: first line of the error that ended it.
        name: name of its experiment; None if it was refused before it had a config.
        config: values by dotted key, without those that follow from others.
        curves: metrics by name.
        devices: number of devices of its last start; None if it has trained no step.
    """

    path: Path
    label: str
    state: str
    failure: str | None = None
    name: str | None = None
    objective: str | None = None
    config: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    devices: int | None = None

    @property
    def steps(self) -> int | None:
        """Optimizer steps since the start of the run; None if no training metric was logged and it has not ended."""
        logged = [step for name, curve in self.curves.items() if name.startswith("train/") for step in curve]
        return max(logged) + 1 if logged else resume.last_step(self.path) or None

    @property
    def peak_bytes(self) -> float:
        """Peak memory of rank 0; 0 if it is unknown."""
        return max(self.curves.get("memory/peak_gib", {}).values(), default=0.0) * 2**30

    def median(self, metric: str) -> float | None:
        """Return the median of a metric, so that pauses do not count; None if it was not logged."""
        values = self.curves.get(metric, {}).values()
        return median(values) if values else None


def find(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the run directories among the paths, those of a sweep's jobs included, and the paths that are none.

    A shell's `runs/NAME/*` includes plans and pages of earlier comparisons.

    Raises:
        Refused: a path does not exist, or there are fewer than two runs.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise Refused(f"{missing[0]}: there is no such directory; give run directories, as runs/NAME/RUN_ID")
    given = {path: _run_dirs(path) for path in paths}
    found = {run_dir.resolve(): run_dir for run_dirs in given.values() for run_dir in run_dirs}
    if len(found) < 2:
        expected = "expected two or more; give run directories, as runs/NAME/RUN_ID, or a sweep's directory"
        raise Refused(f"found {'one run' if found else 'no run'} in {', '.join(map(str, paths))}, {expected}")
    return list(found.values()), [path for path, run_dirs in given.items() if path.is_dir() and not run_dirs]


def read(run_dirs: Sequence[Path]) -> list[Run]:
    """Read runs from their directories."""
    jobs = [record.read(run_dir) for run_dir in run_dirs]
    labels = _labels(run_dirs, jobs)
    return [_read(*found) for found in zip(run_dirs, labels, jobs, strict=True)]


def _run_dirs(path: Path) -> list[Path]:
    if _is_run(path):
        return [path]
    jobs = [job for job in path.iterdir() if _is_run(job) and record.read(job) is not None] if path.is_dir() else []
    return sorted(jobs, key=lambda job: (len(job.name), job.name))


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / "config.yaml").is_file() or record.read(path) is not None)


def _read(run_dir: Path, label: str, job: Record | None) -> Run:
    resolved = resume.read_mapping(run_dir / "config.yaml")
    state, failure = _ending(run_dir, job, mode=str(resolved.get("mode", "fit")))
    curves, begun = _curves(run_dir / "metrics.csv"), resume.starts(run_dir)
    wanted = resolved.get("objective")
    return Run(
        run_dir,
        label,
        state,
        failure,
        name=str(resolved["name"]) if "name" in resolved else None,
        objective=objective.find(curves, str(wanted)) or str(wanted) if wanted is not None else None,
        config=_config(resume.read_mapping(run_dir / ".hydra" / "config.yaml"), resolved),
        curves=curves,
        devices=begun[-1].size if begun else None,
    )


def _ending(run_dir: Path, job: Record | None, mode: str) -> tuple[str, str | None]:
    """Return the state of a run, and the first line of the error that ended it."""
    if job is not None and job.state == FAILED:
        return FAILED, job.error or "it was killed"
    is_evaluated = mode != "fit" and (run_dir / resume.RESULTS).is_file()  # at the end of an evaluation
    if resume.ended(run_dir) is not None or is_evaluated or (job is not None and job.state == FINISHED):
        return FINISHED, None
    reports, start = sorted(run_dir.glob("crash/*/failure.txt")), run_dir / "run.json"
    if reports and not (start.is_file() and reports[-1].stat().st_mtime < start.stat().st_mtime):  # it has gone on
        return FAILED, reports[-1].read_text(errors="replace").partition("\n")[0] or "it was killed"
    return ("not finished" if job is None or job.state == RUNNING else job.state), None


def _config(written: dict[str, Any], resolved: dict[str, Any]) -> dict[str, str]:
    """Return the values that are written as such, or by a resolver; other interpolations follow from these."""
    values = dict(_leaves(resolved))
    texts = dict(_leaves(written)) or values
    own = (key for key, text in texts.items() if "${" not in text or _CALL.search(text))
    return {key: values[key] for key in own if key in values}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node if isinstance(node, str) else json.dumps(node)


def _curves(path: Path) -> dict[str, Curve]:
    """Read metrics.csv, except for a last line that is still being written.

    Raises:
        Refused: the file can't be read as CSV.
    """
    found: dict[str, Curve] = defaultdict(dict)
    try:
        text = path.read_text(errors="replace")
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise Refused(f"{shown(path)} can't be read as the metrics of a run: {error}") from error
    for row in rows:
        step = row.pop("step", "")
        if not re.fullmatch(r"\d{1,15}", step or "", re.ASCII):
            continue
        for name, value in row.items():
            with contextlib.suppress(TypeError, ValueError):  # empty, no number, or beyond the columns
                found[name][int(step)] = float(value)
    return {name: curve for name, curve in found.items() if name and name not in _NOT_VALUES and curve}


def _labels(run_dirs: Sequence[Path], jobs: Sequence[Record | None]) -> list[str]:
    """Return labels that distinguish the runs: overrides of a sweep's job, else the shortest unique end of the path."""
    ends = _shortest_ends([run_dir.resolve().parts for run_dir in run_dirs])
    own = iter(record.distinct([job for job in jobs if job is not None]))
    labels = [(next(own) if job is not None else "") or end for job, end in zip(jobs, ends, strict=True)]
    return [label if labels.count(label) == 1 else end for label, end in zip(labels, ends, strict=True)]


def _shortest_ends(paths: Sequence[tuple[str, ...]]) -> list[str]:
    first = 1 if len({path[:-1] for path in paths}) == 1 else 2  # the name of each, if they differ
    for count in range(first, max(map(len, paths)) + 1):
        ends = [os.path.join(*path[-count:]) for path in paths]
        if len(set(ends)) == len(ends):
            break
    return ends
