"""Each number that a plan prints, with the arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.strategies import Strategy

from lightswitch.deepspeed.strategy import DeepSpeed
from lightswitch.planning import report
from lightswitch.planning.device import CONTEXT_BYTES, CUBLAS_BYTES, GIB, NCCL_BYTES, Device, World
from lightswitch.planning.estimate import STATES, Estimate, Growth, Holding, Run, Traffic, estimate, groups, holding
from lightswitch.planning.ledger import Trace
from lightswitch.planning.simulation import Simulation, Weight
from lightswitch.strategies.ddp import DDP, Single
from lightswitch.strategies.fsdp import FSDP

ONE_NODE, TWO_NODES = World(1, 8), World(2, 8)


@pytest.mark.parametrize(
    ("shards", "world", "gathered"),
    [
        (8, ONE_NODE, Traffic(within=700, between=0)),  # each of 8 devices gets the 7 parts that it lacks
        # of 2 nodes, each gets the other's half; in the node, each of 8 devices gets what came in by the other 7
        (16, TWO_NODES, Traffic(within=700, between=400)),
        (2, World(2, 1), Traffic(within=0, between=400)),
        (1, World(1, 1), Traffic(within=0, between=0)),
    ],
)
def test_links_carry_what_devices_and_nodes_lack(shards: int, world: World, gathered: Traffic) -> None:
    assert groups(shards, world)[0].gather(800) == gathered


def test_replicas_in_other_nodes_share_the_network() -> None:
    shard, replicas = groups(8, TWO_NODES)
    assert (shard.size, replicas.size) == (8, 2)
    assert replicas.gather(100) == Traffic(within=0, between=8 * 50)  # 8 such groups


# What strategies hold of 4 units of 1,000 parameters and a table of 6,000, in 32 bits, with Adam's two moments

KINDS = ("batch", "activations", "casts", "temporary", "buffers", "update", "gradients")


def _trace(phases: list[str], units: list[int] | None = None, **held: list[float]) -> Trace:
    none = [0.0] * len(phases)
    names = (*KINDS, "of_root", "of_unit", "newest")
    columns = {name: np.array(held.get(name, none), dtype=float) for name in names}
    return Trace(np.array(phases), ["block"] * len(phases), np.array(units or [0] * len(phases)), columns)


def _weight(unit: int, numel: int, is_rounded: bool = False) -> Weight:
    return Weight(f"{unit}.weight", 100, numel, 4 * numel, 8 * numel, True, unit, is_rounded)


def _model(is_rounded: bool = False) -> Simulation:
    weights = (_weight(0, 6000), *(_weight(unit, 1000, is_rounded) for unit in range(1, 5)))
    trace = _trace(["forward"])
    return Simulation(weights, 5, (1, 2), (trace, trace), 1.0, {})


def _held(strategy: Strategy, world: World = ONE_NODE, is_rounded: bool = False, precision: str = "32-true") -> Holding:
    return holding(_model(is_rounded), strategy, world, True, precision)


def _states(held: Holding) -> tuple[float, ...]:
    return tuple(held.states[kind] for kind in STATES)


def test_a_replica_is_whole_and_gradients_are_in_buckets_once_more() -> None:
    held = _held(DDP())
    assert _states(held) == (40_000, 40_000, 80_000)
    assert held.communication == [[40_000] * 5] * 3
    assert held.in_a_step == Traffic(2 * 40_000 * 7 / 8)
    assert _held(DDP(gradient_as_bucket_view=True)).communication == [[0] * 5] * 3
    assert _held(Single(), World(1, 1)).communication == [[0] * 5] * 3


def test_shards_are_of_rows_and_the_first_rank_has_the_most() -> None:
    """100 rows over 8 devices: 13 for the first."""
    held = _held(FSDP())
    assert _states(held) == pytest.approx((40_000 * 0.13, 40_000 * 0.13, 80_000 * 0.13))
    assert held.gathered[0] == [24_000, *[24_000 + 4_000] * 4]  # the table all along, and the unit that runs
    assert held.communication[0] == [4_000] * 5  # what has arrived last
    assert held.communication[1] == [
        4_000,
        4_000,
        8_000,
        8_000,
        4_000,
    ]  # the unit before, and the sums of the one after
    assert held.in_a_pass == Traffic(3 * 40_000 * 7 / 8)


def test_units_that_autocast_rounds_are_gathered_in_16_bits_and_summed_in_32() -> None:
    held = _held(FSDP(), is_rounded=True)
    assert held.gathered[0] == [24_000, *[24_000 + 2_000] * 4]
    assert held.in_a_pass == Traffic((2 * 32_000 + 40_000) * 7 / 8)
    assert held.unreduced == {"of_root": 1, "of_unit": 0.5}


def test_gathered_units_stay_until_the_backward_pass_under_grad_op() -> None:
    held = _held(FSDP("SHARD_GRAD_OP"))
    assert held.gathered[0] == [40_000, 28_000, 32_000, 36_000, 40_000]
    assert held.in_a_pass == Traffic((40_000 + 24_000 + 40_000) * 7 / 8)


def test_replicas_of_shards_sum_their_parts() -> None:
    held = _held(FSDP("HYBRID_SHARD"), TWO_NODES)
    assert held.states["parameters"] == pytest.approx(40_000 * 0.13)
    assert held.in_a_pass == Traffic(3 * 40_000 * 7 / 8, 8 * 2 * 5_000 / 2)
    assert held.groups == 3  # and that of all ranks


def test_what_is_offloaded_is_on_the_host_and_on_a_cpu_is_not() -> None:
    assert _held(FSDP(cpu_offload=True)).host == _held(FSDP()).states
    assert holding(_model(), FSDP(cpu_offload=True), ONE_NODE, False, "32-true").host == {}


@pytest.mark.parametrize(
    ("options", "precision", "states", "communication", "host"),
    [
        ({"stage": 1}, "32-true", (40_000, 40_000, 15_000), (0, 800), {}),
        ({"stage": 2}, "32-true", (40_000, 5_000, 15_000), (0, 800), {}),
        ({"stage": 3}, "32-true", (5_000, 5_000, 15_000), (400, 0), {}),
        ({"stage": 2}, "16-mixed", (20_000, 2_500, 15_000), (0, 400), {}),  # and copies in 32 bits
        (
            {"stage": 2, "offload_optimizer": True}, "32-true", (40_000, 5_000, 15_000), (24_000, 800),
            {"optimizer": 15_000, "gradients": 10_000, "update": 24_000},
        ),
        (
            {"stage": 3, "offload_optimizer": True, "offload_parameters": True}, "32-true", (5_000, 5_000, 15_000),
            (400, 0), {"optimizer": 15_000, "gradients": 10_000, "parameters": 5_000},
        ),
    ],
)  # fmt: skip
def test_each_stage_of_zero_shards_one_kind_more(
    options: dict[str, Any], precision: str, states: Any, communication: Any, host: dict[str, float]
) -> None:
    held = _held(DeepSpeed(**options, reduce_bucket_size=100), precision=precision)
    assert _states(held) == states
    assert (held.communication[0][0], held.buckets) == communication
    assert held.host == host


# A peak, and how it grows with the samples of a micro batch, with the arithmetic by hand


def _growth(one: Trace, other: Trace, held: Holding | None = None, accumulation: int = 1) -> Growth:
    step = replace(_model(), traces=(one, other))
    return Growth(step, held or Holding(dict.fromkeys(STATES, 0.0)), accumulation)


def test_a_peak_is_found_anew_at_more_samples() -> None:
    one = _trace(["forward"] * 2, temporary=[50, 0], activations=[0, 10])  # 50, then 10 a sample
    growth = _growth(one, _trace(["forward"] * 2, temporary=[50, 0], activations=[0, 20]))
    assert [growth.peak(samples).bytes for samples in (1, 5, 8)] == [50, 50, 80]  # 10 × 8 > 50
    assert [growth.most(bytes) for bytes in (49, 50, 85)] == [0, 5, 8]


def test_of_a_step_that_takes_another_path_the_peaks_are_extrapolated() -> None:
    """As of a loss that is computed in chunks: no storages correspond."""
    growth = _growth(
        _trace(["forward"] * 2, activations=[0, 20], temporary=[0, 7]),
        _trace(["forward"] * 3, activations=[0, 30, 30], temporary=[0, 0, 7]),
    )
    assert growth.peak(4).by_kind == {"activations": 20 + 3 * 10, "temporary": 7}
    assert growth.most(58) == 4


def test_a_step_that_accumulates_keeps_its_gradients_and_adds_one_at_a_time() -> None:
    step = _trace(
        ["forward", "backward", "backward"], gradients=[30, 10, 30], newest=[0, 10, 20], activations=[9, 5, 0]
    )
    held = Holding({"parameters": 0, "gradients": 30, "optimizer": 0})
    assert _growth(step, step, held).peak(1).bytes == 30 + 9
    assert _growth(step, step, held, accumulation=2).peak(1).bytes == 30 + 20


def test_shards_of_gradients_are_beside_those_that_are_not_reduced_yet() -> None:
    step = _trace(["backward"] * 2, gradients=[80, 160], of_unit=[80, 80], of_root=[0, 8], activations=[9, 0])
    held = Holding({"parameters": 0, "gradients": 20, "optimizer": 0}, 1 / 8, unreduced={"of_unit": 0.5, "of_root": 1})
    assert _growth(step, step, held).peak(1).bytes == 160 / 8 + 80 * 0.5 + 8


# The plan of a run on devices of round numbers

DEVICE = Device(
    "X", 10, {"fp32": 10, "bf16": 100}, memory_gb_per_second=1000, link_gb_per_second=100, network_gb_per_second=10
)
RUN = Run(
    micro_batch=2, accumulation=3, world=TWO_NODES, precision="bf16-mixed",
    matmul_precision="highest", steps=1000, tokens_per_sample=512, global_batch=96,
)  # fmt: skip


def _at(samples: int) -> Trace:
    return _trace(["forward"], activations=[samples * GIB])


STEP = Simulation((_weight(1, 10**9),), 2, (1, 2), (_at(1), _at(2)), 5e12, {})
HELD = Holding(
    {"parameters": 2 * GIB, "gradients": 0, "optimizer": 4 * GIB},
    gathered=[[0, 0]] * 3,
    communication=[[0, 0]] * 3,
    in_a_pass=Traffic(700, 400),
    in_a_step=Traffic(1400, 800),
    groups=1,
)  # and 1 GiB of activations a sample
OFFLOADED = replace(HELD, host=HELD.states)


@pytest.fixture
def found() -> Estimate:
    return estimate(("strategy=fsdp",), STEP, HELD, RUN, DEVICE)


def test_memory_is_tensors_and_what_the_runtime_takes(found: Estimate) -> None:
    tensors = (2 + 4 + 2 * 1) * GIB  # two samples a micro batch
    assert found.memory.peak.bytes == tensors
    assert found.memory.runtime_bytes == CONTEXT_BYTES + CUBLAS_BYTES + NCCL_BYTES + 0.03 * tensors  # one group
    assert found.memory.usable_bytes == 0.99 * 10 * GIB
    assert found.memory.fits  # 8 + 0.5 + 0.03 + 0.25 + 0.24 < 9.9


def test_the_largest_micro_batch_is_the_last_that_fits(found: Estimate) -> None:
    # (6 + m) × 1.03 + 0.78 ≤ 9.9 while m ≤ 2.85
    assert found.largest_micro_batch == 2
    assert estimate((), STEP, HELD, RUN, DEVICE.with_memory(5)).largest_micro_batch == 0


def test_what_is_offloaded_takes_the_hosts_memory_and_its_link() -> None:
    found = estimate((), STEP, OFFLOADED, RUN, DEVICE)
    assert found.memory.host_bytes == 6 * GIB
    assert found.memory.peak.bytes == 2 * GIB
    # shards come twice in each of three micro batches, over 31.5 GB/s
    assert found.seconds["host's memory"] == pytest.approx(2 * 3 * 2 * GIB / 31.5e9)
    faster = estimate((), STEP, OFFLOADED, RUN, replace(DEVICE, host_gb_per_second=63))
    assert faster.seconds["host's memory"] == pytest.approx(2 * 3 * 2 * GIB / 63e9)


def test_a_cpus_memory_is_shared_by_its_processes() -> None:
    cpu = Device("CPU", 16, {}, kind="cpu")
    found = estimate((), STEP, HELD, RUN, cpu)
    assert found.memory.usable_bytes == 16 * GIB / 8
    assert found.memory.runtime_bytes == 0
    assert (found.bound, found.samples_per_second, found.hours) == (None, None, None)


def test_no_step_is_shorter_than_its_slowest_part(found: Estimate) -> None:
    assert found.flops == 5e12 * 2 * 3  # a sample, of two, in three micro batches
    assert found.traffic == Traffic(3 * 700 + 1400, 3 * 400 + 800)
    moved = (3 * (2 * 2 + 2 * 2) + 3 * 2 + 2 * 4) * GIB
    assert found.seconds == pytest.approx(
        {
            "arithmetic": 30e12 / 100e12,
            "memory": moved / 1000e9,
            "links in a node": found.traffic.within / 100e9,
            "network": found.traffic.between / 10e9,
        }
    )
    assert found.bound == "arithmetic"
    assert found.samples_per_second == pytest.approx(2 * 3 * 16 / 0.3)
    assert found.hours == pytest.approx(1000 * 0.3 / 3600)


def test_a_checkpoint_holds_parameters_and_optimizer_state(found: Estimate) -> None:
    assert found.checkpoint_bytes == 12 * 10**9


def test_arithmetic_is_as_fast_as_its_precision() -> None:
    peaks = Device("X", 1, {"fp32": 1, "tf32": 8, "fp16": 16})
    assert peaks.peak_flops("32-true", "highest") == 1e12
    assert peaks.peak_flops("32-true", "high") == 8e12
    assert peaks.peak_flops("16-mixed", "highest") == 16e12
    assert peaks.peak_flops("bf16-mixed", "highest") == 1e12  # it has no bfloat16


def test_what_fits_comes_first_then_what_is_fast_then_what_is_simple(found: Estimate) -> None:
    slow = replace(found, words=("strategy=slow",), run=replace(RUN, steps=2), seconds={"x": 9})
    simple = replace(found, words=("strategy=simple",))
    large = estimate(("strategy=large",), STEP, HELD, RUN, DEVICE.with_memory(8))
    assert [one.words[0] for one in report.ordered([large, slow, simple, found])] == [
        "strategy=simple", "strategy=fsdp", "strategy=slow", "strategy=large"
    ]  # fmt: skip


def test_of_steps_of_microseconds_the_simplest_comes_first(found: Estimate) -> None:
    simple, sends_less = (
        replace(found, words=(name,), seconds={"x": seconds})
        for name, seconds in (("simple", 3e-5), ("sends less", 2e-5))
    )
    assert [one.words[0] for one in report.ordered([simple, sends_less])] == ["simple", "sends less"]


def test_weights_of_16_bits_come_after_those_of_32_and_before_what_does_not_fit(found: Estimate) -> None:
    rounded, large = (
        replace(one, words=(name,), run=replace(RUN, precision="bf16-true"))
        for one, name in ((found, "rounded"), (estimate((), STEP, HELD, RUN, DEVICE.with_memory(8)), "large"))
    )
    slow = replace(found, words=("slow",), seconds={"x": 9})
    assert [one.words[0] for one in report.ordered([large, rounded, slow])] == ["slow", "rounded", "large"]


def test_the_hosts_memory_is_a_column_where_a_row_has_it(found: Estimate) -> None:
    assert "host" not in report.table([found])
    offloaded = estimate(("strategy=fsdp_offload",), STEP, OFFLOADED, RUN, DEVICE)
    header, first, second = report.table([found, offloaded]).splitlines()
    assert header.split()[-1] == "host"
    assert len(first) < len(second) == len(header)
    assert second.split()[-1] == "6"


@pytest.mark.parametrize(
    ("bytes", "told"),
    [(0, "0 MiB"), (40, "<0.001 MiB"), (33e3, "0.0315 MiB"), (4 * 2**30, "4 GiB"), (2**41, "2048 GiB")],
)
def test_bytes_are_told_without_an_exponent(bytes: float, told: str) -> None:
    assert report.amount(bytes) == told


def test_what_is_known_of_the_best_is_told(found: Estimate) -> None:
    assert dict(report.details(found)) == {
        "peak": "forward, at block",
        "step": "30 TFLOP, 3.5 kB sent within the node and 250 B between nodes, per device",
        "save": "11.2 GiB in a checkpoint, over all ranks",
    }


def test_the_answer_is_a_line(found: Estimate) -> None:
    assert report.answer(found, DEVICE) == (
        "fsdp, micro batch 2: 9.02 of 9.9 GiB on X, at most 320 samples/s, 164k tokens/s, the run at least 5:00, "
        "1.33 device-hours"
    )
    large = estimate(("strategy=fsdp",), STEP, HELD, RUN, DEVICE.with_memory(8))
    assert (
        report.answer(large, DEVICE) == "no strategy fits; the smallest is fsdp, micro batch 2: 9.02 of 7.92 GiB on X"
    )
