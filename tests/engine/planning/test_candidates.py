"""What a plan says of devices that lack a precision or memory, with the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightswitch.planning import candidates, report
from lightswitch.planning.device import GIB, Device, World, precision_problems
from lightswitch.planning.estimate import Estimate, Memory, Peak, estimate
from tests.engine.planning.test_estimate import DEVICE, HELD, RUN, STEP, found

NEW, OLD = Device("new", 80, {"fp32": 1, "bf16": 9, "fp16": 9}), Device("old", 16, {"fp32": 1, "fp16": 9})
HERE = Device("here", 80, {})


@pytest.mark.parametrize(
    ("name", "device", "lacks"),
    [("bf16-true", OLD, True), ("bf16-mixed", NEW, False), ("16-mixed", OLD, False), ("bf16-mixed", HERE, False)],
)
def test_a_device_without_bfloat16_is_told(name: str, device: Device, lacks: bool) -> None:
    assert bool(list(precision_problems(name, device))) == lacks


# What would have to change where nothing fits, with the arithmetic by hand

__all__ = ["found"]  # a fixture


def _of(found: Estimate, usable: float) -> Estimate:
    """Of 2 devices, each keeps 6 GiB of states and 2 GiB of activations."""
    peak = Peak({"parameters": 2 * GIB, "optimizer": 4 * GIB, "activations": 2 * GIB})
    memory = Memory(peak, 0, usable * GIB, 0, 0)
    return replace(found, run=replace(RUN, world=World(1, 2)), memory=memory, largest_micro_batch=0)


def test_more_devices_share_the_states_alone(found: Estimate) -> None:
    assert candidates.devices_needed(_of(found, usable=5)) == 4  # 2 × 6 / (5 − 2)
    assert candidates.devices_needed(_of(found, usable=2)) is None
    large = _of(found, usable=5)
    assert (
        candidates.what_would_fit([large], [large], DEVICE) == "use at least 4 devices, or devices of 8.08 GiB"
    )  # 8 / 0.99
    assert candidates.what_would_fit([large], [], DEVICE) == "use devices of 8.08 GiB, or shorter samples"
    assert (
        candidates.what_would_fit([replace(large, largest_micro_batch=3)], [large], DEVICE)
        == "use micro_batch_size=3 or less"
    )


def test_where_the_host_is_too_small_its_memory_is_named_and_not_the_devices() -> None:
    """Each of 8 devices offloads 6 GiB."""
    small = estimate(
        ("strategy=fsdp_offload",), STEP, replace(HELD, host=HELD.states), RUN, replace(DEVICE, host_gib=40)
    )
    assert (small.memory.fits, small.largest_micro_batch) == (False, 0)
    assert candidates.what_would_fit([small], [], DEVICE) == "use more nodes, or nodes with 48 GiB of free memory"
    assert report.took(small, DEVICE) == "fsdp_offload, micro batch 2: 2.84 of 9.9 GiB on X, 6 of 5 GiB on the host"
    sharded = estimate((), STEP, HELD, RUN, DEVICE.with_memory(8))
    advice = candidates.what_would_fit([small, replace(sharded, largest_micro_batch=0)], [], DEVICE)
    assert advice == "use devices of 9.11 GiB, or shorter samples"  # not the 2.84 that the other one takes
