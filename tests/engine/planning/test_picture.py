"""Numbers and units in the pictures of plans and of scaling, whatever the size of the run."""

from __future__ import annotations

import re

import pytest

from lightswitch.planning import report, scaling
from lightswitch.planning.collectives import Traffic
from lightswitch.planning.device import Device
from lightswitch.planning.estimate import Estimate, Memory, Run, StepTime
from lightswitch.planning.scaling import Line, Point
from lightswitch.planning.timeline import Peak

pytest.importorskip("matplotlib")

MIB = 2**20
EXPONENT = re.compile(r"\de[+-]?\d|10\^|×10|mathdefault")


def _estimate(bytes: float) -> Estimate:
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
    drawn = report.picture([_estimate(bytes)], Device("H100", 80, {}))
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
