"""Each number that a plan prints, with the arithmetic by hand."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from lightswitch.planning import device, report
from lightswitch.planning.candidates import Candidate
from lightswitch.planning.collectives import Collective, Traffic, traffic
from lightswitch.planning.device import CONTEXT_BYTES, CUBLAS_BYTES, GIB, NCCL_BYTES, Device
from lightswitch.planning.estimate import STATES, Estimate, Run, Step, estimate
from lightswitch.planning.timeline import Change, Growth, Timeline

EIGHT, BOTH = tuple(range(8)), tuple(range(16))


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        # each of 8 devices gets the 7 parts that it lacks
        (Collective("all_gather", 800, EIGHT), Traffic(within=700, between=0)),
        (Collective("reduce_scatter", 800, EIGHT), Traffic(within=700, between=0)),
        (Collective("all_reduce", 800, EIGHT), Traffic(within=2 * 700, between=0)),
        # of 2 nodes, each gets the other's half; in the node, each of 8 devices gets what came in by the other 7
        (Collective("all_gather", 800, BOTH), Traffic(within=700, between=400)),
        # one device a node: 8 such groups share the network
        (Collective("all_reduce", 100, (0, 8)), Traffic(within=0, between=2 * 8 * 50)),
        (Collective("all_gather", 800, (0,)), Traffic(within=0, between=0)),
    ],
)
def test_links_carry_what_devices_and_nodes_lack(collective: Collective, expected: Traffic) -> None:
    assert traffic([collective], devices_per_node=8) == expected


# A peak, and how it grows with the samples of a micro batch, with the arithmetic by hand


def _timeline(before: int, *changes: tuple[str, int]) -> Timeline:
    return Timeline({"parameters": before}, tuple(Change(kind, bytes, "forward", "block") for kind, bytes in changes))


def test_a_peak_is_the_first_moment_at_which_most_is_held() -> None:
    step = _timeline(100, ("activations", 30), ("activations", -10), ("temporary", 10), ("temporary", -10))
    peak = step.peak()
    assert peak.bytes == 100 + 30  # and once more after 30 − 10 + 10
    assert peak.by_kind == {"parameters": 100, "activations": 30}
    assert (peak.phase, peak.where) == ("forward", "block")


def test_a_step_that_only_gives_back_is_highest_at_its_start() -> None:
    assert _timeline(100, ("parameters", -40)).peak().bytes == 100


def test_a_peak_is_found_anew_at_more_samples() -> None:
    one = _timeline(0, ("temporary", 50), ("temporary", -50), ("activations", 10))  # 50, then 10 a sample
    two = _timeline(0, ("temporary", 50), ("temporary", -50), ("activations", 20))
    growth = Growth((1, 2), (one, two))
    assert [growth.at(samples).peak().bytes for samples in (1, 5, 8)] == [50, 50, 80]  # 10 × 8 > 50
    assert [growth.peak_bytes(samples) for samples in (1, 5, 8)] == [50, 50, 80]


def test_growth_is_not_known_of_one_size() -> None:
    step = _timeline(0, ("activations", 1))
    growth = Growth((2, 2), (step, step))
    assert not growth.is_known
    assert growth.at(9) == step


def test_of_a_step_that_takes_another_path_the_peaks_are_extrapolated() -> None:
    """As of a loss that is computed in chunks: no storages correspond."""
    two = _timeline(5, ("activations", 20), ("temporary", 7))  # 32
    four = _timeline(5, ("activations", 40), ("temporary", 7), ("temporary", -7), ("temporary", 7))  # 52
    growth = Growth((2, 4), (two, four))
    peak = growth.at(8).peak()
    assert peak.by_kind == {"parameters": 5, "activations": 20 + 3 * 20, "temporary": 7}
    assert peak.bytes == growth.peak_bytes(8) == 32 + 3 * 20
    assert (peak.phase, peak.where) == ("forward", "block")
    assert growth.at(1).peak().bytes == growth.peak_bytes(1) == 32 - 10


def test_a_step_that_accumulates_keeps_its_gradients_and_adds_one_at_a_time() -> None:
    step = Timeline(
        {"gradients": 30},
        tuple(
            Change(kind, bytes, "backward", "")
            for kind, bytes in (("gradients", -30), ("gradients", 10), ("activations", 5), ("gradients", 20))
        ),
    )
    assert step.held() == [30, 0, 10, 15, 35]
    assert step.accumulating().held() == [30, 30, 30 + 10, 30 + 10 + 5, 30 + 5 + 20]


# The plan of a run on devices of round numbers

DEVICE = Device(
    "X", 10, {"fp32": 10, "bf16": 100}, memory_gb_per_second=1000, link_gb_per_second=100, network_gb_per_second=10
)
RUN = Run(
    micro_batch=2, accumulation=3, replicas=16, nodes=2, devices_per_node=8, precision="bf16-mixed",
    matmul_precision="highest", steps=1000, tokens_per_sample=512, disk_gb_per_second=2, global_batch=96,
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


def test_the_device_and_the_host_have_their_own_peaks() -> None:
    """A step's gradients fill the host until the backward pass begins; the device is fullest in that pass."""

    def at(samples: int) -> Timeline:
        changes = [("activations", 4 * samples, "forward"), ("gradients", -3, "backward"), ("gathered", 1, "backward")]
        changes += [
            ("activations", -4 * samples, "backward"),
            ("gradients", 3, "backward"),
            ("gathered", -1, "backward"),
        ]
        changes += [("update", 2, "optimizer"), ("update", -2, "optimizer")]
        held = {"parameters": 2 * GIB, "gradients": 3 * GIB}
        return Timeline(held, tuple(Change(kind, GIB * bytes, phase, "") for kind, bytes, phase in changes))

    step = replace(STEP, growth=Growth((1, 2), (at(1), at(2))))
    found = estimate((), step, replace(RUN, micro_batch=1), DEVICE, on_host=(*STATES, "update"))
    assert (found.memory.peak.bytes, found.memory.peak.phase) == ((4 + 1) * GIB, "backward")
    assert (found.memory.host_bytes, found.memory.host_peak.phase) == ((2 + 3 + 2) * GIB, "optimizer")
    # 4 m + 1 (the host's 7 aside) times 1.03, and 0.78 of the runtime, are at most 9.9 while m ≤ 1.96
    assert found.largest_micro_batch == 1


def test_on_a_cpu_what_is_offloaded_takes_its_memory_all_the_same() -> None:
    cpu = Device("CPU", 80, {}, kind="cpu")
    found, offloading = (estimate((), STEP, RUN, cpu, on_host=kinds) for kinds in ((), STATES))
    assert offloading.memory == found.memory
    assert (offloading.memory.peak.bytes, offloading.memory.host_bytes) == (8 * GIB, 0)
    assert offloading.largest_micro_batch == found.largest_micro_batch == 4  # 6 + m ≤ 80 / 8


def test_the_hosts_link_is_the_devices_own() -> None:
    found = estimate((), STEP, RUN, replace(DEVICE, host_gb_per_second=63), on_host=STATES)
    assert found.time.seconds["host's memory"] == pytest.approx(2 * 3 * 2 * GIB / 63e9)


def test_a_strategy_that_computes_in_another_dtype_has_its_peak() -> None:
    whole = replace(RUN, precision="32-true")
    seconds = [
        estimate((), STEP, replace(whole, param_dtype=dtype), DEVICE).time.seconds["arithmetic"]
        for dtype in (None, "bfloat16")
    ]
    assert seconds == pytest.approx([5e12 * 2 * 3 / 10e12, 5e12 * 2 * 3 / 100e12])  # of two samples, three times
    assert (Candidate((), {"param_dtype": "bfloat16"}).param_dtype, Candidate((), {}).param_dtype) == ("bfloat16", None)


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


def test_of_steps_of_microseconds_the_simplest_comes_first(found: Estimate) -> None:
    simple, sends_less = (
        replace(found, words=(name,), time=replace(found.time, seconds={"x": seconds}))
        for name, seconds in (("simple", 3e-5), ("sends less", 2e-5))
    )
    assert [one.words[0] for one in report.ordered([simple, sends_less])] == ["simple", "sends less"]


def test_weights_of_16_bits_come_after_those_of_32_and_before_what_does_not_fit(found: Estimate) -> None:
    rounded, large = (
        replace(one, words=(name,), run=replace(RUN, precision="bf16-true"))
        for one, name in ((found, "rounded"), (estimate((), STEP, RUN, DEVICE.with_memory(8)), "large"))
    )
    slow = replace(found, words=("slow",), time=replace(found.time, seconds={"x": 9}))
    assert [one.words[0] for one in report.ordered([large, rounded, slow])] == ["slow", "rounded", "large"]


def test_precision_and_the_hosts_memory_are_columns_where_rows_have_them(found: Estimate) -> None:
    header, *_ = report.table([found]).splitlines()
    assert "precision" not in header
    assert "host" not in header
    named = replace(found, words=("strategy=fsdp", "precision=bf16-mixed"))
    offloaded = estimate(("strategy=fsdp", "precision=32-true"), STEP, RUN, DEVICE, on_host=STATES)
    header, first, second = report.table([named, offloaded]).splitlines()
    assert header.split()[:2] == ["strategy", "precision"]
    assert (first.split()[:2], second.split()[:2]) == (["fsdp", "bf16-mixed"], ["fsdp", "32-true"])
    assert header.split()[-1] == "host"
    assert len(first) < len(second) == len(header)
    assert second.split()[-1] == "6"


def test_a_reason_is_told_once_with_all_that_it_keeps_out() -> None:
    taken = [("strategy=ddp", "precision=a"), ("strategy=ddp", "precision=b"), ("strategy=fsdp", "precision=a", "more")]
    refused = {
        ("strategy=single", "precision=a"): "one device",
        ("strategy=single", "precision=b"): "one device\nsingle at b",
        ("strategy=single", "precision=c"): "precision=c: no such numbers\none device",
        ("strategy=ddp", "precision=c"): "precision=c: no such numbers",
        ("strategy=fsdp", "precision=c"): "precision=c: no such numbers",
        ("strategy=fsdp", "precision=b"): "not at b",
    }
    assert list(report.left_out(refused, taken)) == [
        "strategy=single: one device",
        "strategy=single precision=b: single at b",
        "precision=c: no such numbers",
        "strategy=fsdp precision=b: not at b",
    ]
    assert list(report.left_out({("strategy=x",): "why"}, [("strategy=y",)])) == ["strategy=x: why"]
    one_device = "strategy=single uses one device; use strategy=ddp"
    assert list(report.left_out({("strategy=single",): one_device}, [("strategy=y",)])) == [one_device]


@pytest.mark.parametrize(
    ("bytes", "told"),
    [(0, "0 MiB"), (40, "<0.001 MiB"), (33e3, "0.0315 MiB"), (4 * 2**30, "4 GiB"), (2**41, "2048 GiB")],
)
def test_bytes_are_told_without_an_exponent(bytes: float, told: str) -> None:
    assert report.amount(bytes) == told


def test_what_is_known_of_the_best_is_told(found: Estimate) -> None:
    assert dict(report.details(found)) == {
        "peak": "forward, at block",
        "step": "30 TFLOP, 4.2 kB sent within the node and 300 B between nodes, per device",
        "save": "11.2 GiB, in 6 s at 2 GB/s",
    }
    offloaded = dict(report.details(estimate(("strategy=fsdp",), STEP, RUN, DEVICE, on_host=STATES)))
    assert offloaded["host"] == "6 GiB of the host's memory for each device"


def test_the_answer_is_a_line(found: Estimate) -> None:
    assert report.answer(found, DEVICE) == (
        "fsdp, micro batch 2: 9.02 of 9.9 GiB on X, at most 320 samples/s, 164k tokens/s, the run at least 5:00, "
        "1.33 device-hours"
    )
    large = estimate(("strategy=fsdp",), STEP, RUN, DEVICE.with_memory(8))
    assert (
        report.answer(large, DEVICE) == "no strategy fits; the smallest is fsdp, micro batch 2: 9.02 of 7.92 GiB on X"
    )


def test_gpus_are_looked_at_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks that are forked after it could not use CUDA. There is no GPU here, so a function says who asks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device, "_smallest_gpu", lambda: (str(os.getpid()), 80 * GIB))
    found = device.here()
    assert (found.name == str(os.getpid()), found.memory_gib) == (False, 80)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device.here().name == str(os.getpid())
