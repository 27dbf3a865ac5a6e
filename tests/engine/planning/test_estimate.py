"""Each number that a plan prints, with the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightswitch.planning import report
from lightswitch.planning.collectives import Collective
from lightswitch.planning.device import CONTEXT_BYTES, CUBLAS_BYTES, GIB, NCCL_BYTES, Device
from lightswitch.planning.estimate import STATES, Estimate, Run, Step, estimate
from lightswitch.planning.timeline import Change, Growth, Timeline

DEVICE = Device(
    "X", 10, {"fp32": 10, "bf16": 100}, memory_gb_per_second=1000, link_gb_per_second=100, network_gb_per_second=10
)
RUN = Run(
    micro_batch=2, accumulation=3, replicas=16, nodes=2, devices_per_node=8, precision="bf16-mixed",
    matmul_precision="highest", steps=1000, tokens_per_sample=512, disk_gb_per_second=2,
)  # fmt: skip


def _at(samples: int) -> Timeline:
    """2 GiB of parameters, 4 of optimizer state, and 1 of activations a sample."""
    held = {"parameters": 2 * GIB, "optimizer": 4 * GIB}
    return Timeline(held, (Change("activations", samples * GIB, "forward", "block"),))


STEP = Step(
    growth=Growth((1, 2), (_at(1), _at(2))),
    samples=1,
    micro_flops=5e12,
    micro_collectives=(Collective("all_gather", 800, tuple(range(16))),),
    last_collectives=(Collective("all_reduce", 1600, tuple(range(16))),),
    parameters=10**9,
    parameter_bytes=4 * 10**9,
    optimizer_bytes=8 * 10**9,
)


@pytest.fixture
def found() -> Estimate:
    return estimate(("strategy=fsdp",), STEP, RUN, DEVICE)


def test_memory_is_tensors_and_what_the_runtime_takes(found: Estimate) -> None:
    tensors = (2 + 4 + 2 * 1) * GIB  # two samples a micro batch
    assert found.memory.peak.bytes == tensors
    assert found.memory.runtime_bytes == CONTEXT_BYTES + CUBLAS_BYTES + NCCL_BYTES + 0.03 * tensors  # one group
    assert found.memory.usable_bytes == 0.99 * 10 * GIB
    assert found.memory.fits  # 8 + 0.5 + 0.03 + 0.25 + 0.24 < 9.9


def test_the_largest_micro_batch_is_the_last_that_fits(found: Estimate) -> None:
    # (6 + m) × 1.03 + 0.78 ≤ 9.9 while m ≤ 2.85
    assert found.largest_micro_batch == 2
    assert estimate((), STEP, RUN, DEVICE.with_memory(5)).largest_micro_batch == 0


def test_what_is_offloaded_is_on_the_host() -> None:
    found = estimate((), STEP, RUN, DEVICE, on_host=STATES)
    assert found.memory.host_bytes == 6 * GIB
    assert found.memory.peak.bytes == 2 * GIB
    # shards come twice in each of three micro batches, over 31.5 GB/s
    assert found.time.seconds["host's memory"] == pytest.approx(2 * 3 * 2 * GIB / 31.5e9)


def test_a_cpus_memory_is_shared_by_its_processes() -> None:
    cpu = Device("CPU", 16, {}, kind="cpu")
    found = estimate((), STEP, RUN, cpu)
    assert found.memory.usable_bytes == 16 * GIB / 8
    assert found.memory.runtime_bytes == 0
    assert (found.time.bound, found.samples_per_second, found.hours) == (None, None, None)


def test_no_step_is_shorter_than_its_slowest_part(found: Estimate) -> None:
    assert found.flops == 5e12 * 2 * 3  # a sample, of two, in three micro batches
    assert found.traffic.between == 2 * 800 / 2 + 2 * 1600 / 2  # two gathered, one reduced; half is the other node's
    assert found.traffic.within == 2 * 800 * 7 / 8 + 2 * 1600 * 7 / 8
    moved = (3 * (2 * 2 + 2 * 2) + 3 * 2 + 2 * 4) * GIB
    assert found.time.seconds == pytest.approx(
        {
            "arithmetic": 30e12 / 100e12,
            "memory": moved / 1000e9,
            "links in a node": found.traffic.within / 100e9,
            "network": found.traffic.between / 10e9,
        }
    )
    assert found.time.bound == "arithmetic"
    assert found.samples_per_second == pytest.approx(2 * 3 * 16 / 0.3)
    assert found.hours == pytest.approx(1000 * 0.3 / 3600)


def test_a_checkpoint_holds_parameters_and_optimizer_state(found: Estimate) -> None:
    assert found.checkpoint_bytes == 12 * 10**9
    assert found.save_seconds == 6  # at 2 GB/s


def test_arithmetic_is_as_fast_as_its_precision() -> None:
    peaks = Device("X", 1, {"fp32": 1, "tf32": 8, "fp16": 16})
    assert peaks.peak_flops("32-true", "highest") == 1e12
    assert peaks.peak_flops("32-true", "high") == 8e12
    assert peaks.peak_flops("16-mixed", "highest") == 16e12
    assert peaks.peak_flops("bf16-mixed", "highest") == 1e12  # it has no bfloat16


def test_what_fits_comes_first_then_what_is_fast_then_what_is_simple(found: Estimate) -> None:
    slow = replace(
        found, words=("strategy=slow",), run=replace(RUN, steps=2), time=replace(found.time, seconds={"x": 9})
    )
    simple = replace(found, words=("strategy=simple",))
    large = estimate(("strategy=large",), STEP, RUN, DEVICE.with_memory(8))
    assert [one.words[0] for one in report.ordered([large, slow, simple, found])] == [
        "strategy=simple", "strategy=fsdp", "strategy=slow", "strategy=large"
    ]  # fmt: skip


def test_the_answer_is_a_line(found: Estimate) -> None:
    assert report.answer(found, DEVICE) == (
        "fsdp, micro batch 2: 9.02 of 9.9 GiB on X, at most 320 samples/s, 164k tokens/s, the run at least 5:00, "
        "1.33 device-hours"
    )
    large = estimate(("strategy=fsdp",), STEP, RUN, DEVICE.with_memory(8))
    assert report.answer(large, DEVICE) == "nothing fits; the least is fsdp, micro batch 2: 9.02 of 7.92 GiB on X"
