"""What the whole suite may take, package by package, so that whoever adds tests sees what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

# By folder of tests/engine, or file beside them: seconds of the tests, of which four run at a time on two cores. They
# add up to four times 35 minutes; a whole run that is slower throughout is of a slower or busier machine.
SECONDS = {
    **{"batches": 185, "benchmarks": 325, "checkpoints": 625, "cluster": 10, "compare": 50, "config": 175},
    **{"deepspeed": 220, "doctor": 60, "export": 140, "fault_tolerance": 295, "fork": 480, "launch": 550},
    **{"monitoring": 65, "planning": 340, "preflight": 45, "reference": 25, "runs": 200, "slurm": 1330},
    **{"strategies": 1360, "sweeps": 295, "test_checkout.py": 90, "test_every_switch.py": 100},
    **{"test_extension.py": 35, "test_gpu.py": 385, "test_matrix.py": 155, "test_same_run.py": 115},
    **{"test_survives.py": 135, "test_tutorial.py": 135, "project": 270, "others": 205},
}
TOLERANCE = 1.15  # of a budget, as two runs differ
Durations = Iterable[tuple[str, float]]  # the path of a test's file, and seconds of its setup, call or teardown


def by_package(durations: Durations) -> dict[str, float]:
    """Return the seconds of each entry of SECONDS that has tests."""
    found: Counter[str] = Counter()
    for path, seconds in durations:
        found[_entry(path)] += seconds
    return dict(found)


def told(found: Mapping[str, float]) -> list[str]:
    """Return a line for the whole, and one for each package that took more than its share of it.

    A budget is stretched by how much the whole is over its own: a slow machine is no reason to warn of each package.
    """
    whole, budget = sum(found.values()), sum(SECONDS[name] for name in found)
    slowness = max(1.0, whole / budget)
    lines = [f"{whole:.0f} s of tests, of a budget of {budget} s (tests/engine/budget.py)"]
    over = {name: seconds for name, seconds in found.items() if seconds > SECONDS[name] * slowness * TOLERANCE + 5}
    for name, seconds in sorted(over.items(), key=lambda item: SECONDS[item[0]] - item[1]):
        lines.append(f"over its budget: {name}: {seconds:.0f} s of {SECONDS[name]} s")
    return lines


def _entry(path: str) -> str:
    parts = PurePosixPath(path).parts
    name = parts[1] if parts[1] == "project" else parts[2]
    return name if name in SECONDS else "others"
