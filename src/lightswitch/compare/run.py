"""Read a run, finished or not, from its directory."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lightswitch import regular_files
from lightswitch.errors import Refused, shown
from lightswitch.monitoring import objective, step_times
from lightswitch.monitoring.step_times import StepTimes
from lightswitch.runs import finished, saved, starts
from lightswitch.sweeps import record
from lightswitch.sweeps.record import FAILED, FINISHED, RUNNING, Record

Curve = dict[int, float]  # values by step, counted from 0

_MOST_BYTES = 1 << 30  # largest metrics.csv
_LARGEST = 1e100
_CALL = re.compile(r"\$\{\w+:")  # call of a resolver, whose value may differ between runs
_NOT_VALUES = ("step", "samples", "epoch", "world")
_SPEED, _OTHERS = "throughput/", ("throughput/", "memory/", "lr-")


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        label: short text that distinguishes it from the other runs.
        name: name of its experiment; None if it was refused before it had a config.
        config: resolved values, by dotted key, that were set directly or by a resolver.
        curves: metrics by name.
        state: finished, not finished, stopped, or failed.
        failure: first line of the error that ended it.
        changes: steps at which it resumed on other machines or with another number of devices.
        times: None if its steps were not measured.
        tags: tags from its config.
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
    changes: tuple[int, ...] = ()
    times: StepTimes | None = None
    tags: frozenset[str] = frozenset()
    devices: int | None = None

    @property
    def world_size(self) -> int | None:
        """Number of devices; None if unknown."""
        if self.times is not None:
            return self.times.world_size
        if self.devices is not None:
            return self.devices
        counts = [self.config.get(f"trainer.{key}", "") for key in ("devices", "num_nodes")]
        is_known = all(re.fullmatch(r"\d{1,6}", count, re.ASCII) for count in counts)
        return int(counts[0]) * int(counts[1]) if is_known else None

    @property
    def steps(self) -> int | None:
        """Optimizer steps since the start of the run; None if no training metric was logged and it has not ended."""
        logged = [step for name, curve in self.curves.items() if name.startswith("train/") for step in curve]
        return max(logged) + 1 if logged else finished.last_step(self.path) or None

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that the module logs, which say nothing of speed, memory or learning rates."""
        return [name for name in self.curves if not name.startswith(_OTHERS)]

    def median(self, quantity: str) -> float | None:
        """Return the median of the logged values of a speed, so that pauses and profiled steps do not count."""
        values = list(self.curves.get(f"{_SPEED}{quantity}", {}).values())
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
    resolved = saved.read_yaml(run_dir / "config.yaml")
    resolved = resolved if isinstance(resolved, dict) else {}
    state, failure = _ending(run_dir, job, mode=str(resolved.get("mode", "fit")))
    curves, begun = _curves(run_dir / "metrics.csv"), starts.read(run_dir)
    return Run(
        run_dir,
        label,
        state,
        failure,
        name=str(resolved["name"]) if "name" in resolved else None,
        objective=_objective(resolved, curves),
        config=_chosen(saved.read_yaml(run_dir / ".hydra" / "config.yaml"), resolved),
        curves=curves,
        changes=tuple(starts.changes(begun).steps),
        times=step_times.read(run_dir),
        tags=frozenset(map(str, resolved["tags"])) if isinstance(resolved.get("tags"), list) else frozenset(),
        devices=begun[-1].size if begun else None,
    )


def _ending(run_dir: Path, job: Record | None, mode: str) -> tuple[str, str | None]:
    if job is not None and job.state == FAILED:
        return FAILED, job.error or "it was killed"
    is_evaluated = mode != "fit" and (run_dir / finished.RESULTS).is_file()  # at the end of an evaluation
    if finished.is_marked(run_dir) or is_evaluated or (job is not None and job.state == FINISHED):
        return FINISHED, None
    reports = sorted(run_dir.glob("crash/*/failure.txt"))
    if reports and not _is_older(reports[-1], run_dir / "run.json"):  # which a start writes: that one has gone on since
        return FAILED, _first_line(reports[-1]) or "it was killed"
    return ("not finished" if job is None or job.state == RUNNING else job.state), None


def _is_older(path: Path, other: Path) -> bool:
    return other.is_file() and path.stat().st_mtime < other.stat().st_mtime


def _first_line(report: Path) -> str:
    try:
        return regular_files.read_text(report, "replace").partition("\n")[0]
    except (OSError, ValueError) as error:
        return str(error)


def _objective(resolved: dict[str, Any], curves: dict[str, Curve]) -> str | None:
    """Return the objective of a run, by the name under which its module logs it."""
    if "objective" not in resolved:
        return None
    wanted = str(resolved["objective"])
    return objective.find(curves, wanted) or wanted


def _chosen(written: Any, resolved: dict[str, Any]) -> dict[str, str]:
    """Return the resolved values that are written as plain values or resolver calls.

    Other interpolations are left out, because they follow from these. The run's directory is replaced by RUN.
    """
    trainer = resolved.get("trainer")
    own = str(trainer.get("default_root_dir", "")) if isinstance(trainer, dict) else ""
    values = dict(_leaves(resolved))
    texts = dict(_leaves(written)) if isinstance(written, dict) else values
    kept = (key for key, text in texts.items() if "${" not in text or _CALL.search(text))
    return {key: values[key].replace(own, "RUN") if own else values[key] for key in kept if key in values}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        yield from _leaves(dict(enumerate(node)), path)
    elif path:
        yield path, _text(node)


def _text(value: Any) -> str:
    """Format a value as on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def _curves(path: Path) -> dict[str, Curve]:
    """Read metrics.csv, except for a last line that is still being written.

    Raises:
        Refused: the file can't be read as CSV, or is too large.
    """
    found: dict[str, Curve] = defaultdict(dict)
    try:
        text = regular_files.read_text(path, "replace", _MOST_BYTES)
        rows = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise Refused(f"{shown(path)} can't be read as the metrics of a run: {error}") from error
    for row in rows:
        if not re.fullmatch(r"\d{1,15}", row.get("step") or "", re.ASCII):
            continue
        for name, value in row.items():
            if name and value and (number := _number(value)) is not None:
                found[name][int(row["step"])] = number
    return {name: curve for name, curve in found.items() if name not in _NOT_VALUES}


def _number(text: Any) -> float | None:
    """Parse a number; return None if it is not one.

    Magnitudes above 1e100 become infinite: no run computes them in 32 bits, and arithmetic on them would overflow.
    """
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return math.copysign(math.inf, number) if abs(number) > _LARGEST else number


def _labels(run_dirs: Sequence[Path], jobs: Sequence[Record | None]) -> list[str]:
    """Return labels that distinguish the runs: overrides of a sweep's job, else the shortest unique end of the path."""
    ends = _shortest_ends([run_dir.resolve().parts for run_dir in run_dirs])
    own = _own_overrides(jobs)
    keys = {word.partition("=")[0] for words in own for word in words}
    if len(keys) == 1:  # only the values are needed: ddp, fsdp for strategy=ddp, strategy=fsdp
        own = [[word.partition("=")[2] or word for word in words] for words in own]
    labels = [" ".join(words) or end for words, end in zip(own, ends, strict=True)]
    return [
        f"{label} ({end})" if labels.count(label) > 1 and label != end else label
        for label, end in zip(labels, ends, strict=True)
    ]


def _own_overrides(jobs: Sequence[Record | None]) -> list[list[str]]:
    """Return the overrides of each job that not all jobs share; an empty list for runs that are not jobs."""
    overrides = [list(job.overrides) if job is not None else [] for job in jobs]
    shared = set.intersection(*(set(words) for words in overrides if words)) if any(overrides) else set()
    return [[word.lstrip("+") for word in words if word not in shared] for words in overrides]


def _shortest_ends(paths: Sequence[tuple[str, ...]]) -> list[str]:
    first = 1 if len({path[:-1] for path in paths}) == 1 else 2  # the name of each, if they differ
    for count in range(first, max(map(len, paths)) + 1):
        ends = [os.path.join(*path[-count:]) for path in paths]
        if len(set(ends)) == len(ends):
            break
    return ends
