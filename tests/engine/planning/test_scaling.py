"""How a run scales with its devices, and the pictures of that and of plans, whatever the size of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightswitch.planning import report, scaling
from lightswitch.planning.collectives import Traffic
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Memory, Run, StepTime
from lightswitch.planning.scaling import Line, Point
from lightswitch.planning.timeline import Peak


def _estimate(nodes: int, seconds: float) -> dict[str, Any]:
    return {
        **{"nodes": nodes, "devices_per_node": 8, "replicas": 8 * nodes, "micro_batch": 2},
        **{
            "global_batch": 64,
            "accumulation": 4 // nodes,
            "bytes": 2**30,
            "usable_bytes": 2**31,
            "bound_by": "network",
        },
        **{"bound_by": "network", "least_seconds": {"network": seconds, "arithmetic": seconds / 2}},
        **{"bytes_within_node": 1e9, "bytes_between_nodes": 8e9},
    }


def _plan(folder: Path, name: str, nodes: int, seconds: float) -> Path:
    (folder / name).mkdir()
    file = folder / name / scaling.FILE
    file.write_text(json.dumps({"strategy": "fsdp", "estimate": _estimate(nodes, seconds)}))
    return file


def test_efficiency_is_of_a_device_against_the_least_world(tmp_path: Path) -> None:
    (line,) = scaling.read({_plan(tmp_path, "0", 2, 1.5): (), _plan(tmp_path, "1", 1, 2.0): ()})
    assert [(point.ranks, point.global_batch) for point in line.points] == [(8, 64), (16, 64)]
    assert line.efficiencies() == [1, pytest.approx(2.0 / (2 * 1.5))]  # 64 / 1.5 / 16 by 64 / 2 / 8
    assert line.points[0].received_bytes == 1e9 + 8e9 / 8  # what a node gets is shared by its devices
    rows = scaling.table(line).splitlines()
    assert rows[2].split() == ["16", "64", "2", "×", "2", "1", "yes", "1.5", "network", "2", "42.7", "67%"]


def test_jobs_that_differ_in_more_than_the_world_are_lines_of_their_own(tmp_path: Path) -> None:
    given = {
        _plan(tmp_path, f"{model}{nodes}", nodes, 2.0): [f"trainer.num_nodes={nodes}", f"model={model}", "seed=1"]
        for model in ("small", "large")
        for nodes in (1, 2)
    }
    lines = scaling.read(given)
    assert {line.strategy: len(line.points) for line in lines} == {"fsdp model=large": 2, "fsdp model=small": 2}
    assert [line.efficiencies() for line in lines] == [[1, 0.5], [1, 0.5]]


# Numbers and units in the pictures of plans and of scaling, whatever the size of the run

pytest.importorskip("matplotlib")

MIB = 2**20
EXPONENT = re.compile(r"\de[+-]?\d|10\^|×10|mathdefault")


def _planned_bytes(bytes: float) -> Estimate:
    memory = Memory(Peak(bytes, {"parameters": bytes}, "forward", ""), 0.0, 2 * bytes, Peak(0.0, {}, "", ""), 0.0)
    run = Run(8, 1, 2, 1, 2, "32-true", "highest", None, None, 1.0, 16)
    return Estimate(("strategy=ddp",), run, memory, None, 0.0, Traffic(0.0, 0.0), StepTime({}), 1, 1)


@pytest.mark.parametrize(
    ("bytes", "axis", "told"),
    [
        (0.02 * MIB, "MiB on each device", "micro batch 8: 0.02 MiB."),
        (5.5 * MIB, "MiB on each device", "micro batch 8: 5.5 MiB."),
        (61.2 * 1024 * MIB, "GiB on each device", "micro batch 8: 61.2 GiB."),
        (1234 * 1024 * MIB, "GiB on each device", "micro batch 8: 1234 GiB."),
    ],
)
def test_the_memory_of_a_plan_has_a_unit_that_fits(bytes: float, axis: str, told: str) -> None:
    drawn = report.picture([_planned_bytes(bytes)], Device("H100", 80, {}))
    assert axis in drawn.light
    assert told in drawn.description
    texts = re.findall(r">([^<>]*)</text>", drawn.light)
    assert [text for text in texts if EXPONENT.search(text)] == []
    ticks = [float(text.replace("−", "-")) for text in texts if re.fullmatch(r"[\d.]+", text)]
    assert 0.01 <= max(ticks) <= 5000


@pytest.mark.parametrize(
    ("seconds", "bytes", "units", "told"),
    [
        (2e-5, 3 * MIB, ("milliseconds a step", "MiB on a device", "MB that"), "at least 0.02 ms, 3 MiB, 3.15 MB"),
        (2.5, 2048 * MIB, ("seconds a step", "GiB on a device", "GB that"), "at least 2.5 s, 2 GiB, 2.15 GB"),
    ],
)
def test_the_axes_of_scaling_have_units_that_fit(
    seconds: float, bytes: float, units: tuple[str, ...], told: str
) -> None:
    points = [Point(2**n, 64, 8, 1, bytes, 2 * bytes, seconds / 2**n, "arithmetic", bytes) for n in range(4)]
    drawn = scaling.picture([Line("fsdp", tuple(points))])
    texts = re.findall(r">([^<>]*)</text>", drawn.light)
    assert all(any(text.startswith(unit) for text in texts) for unit in units)
    assert [text for text in texts if EXPONENT.search(text)] == []
    assert told in drawn.description
