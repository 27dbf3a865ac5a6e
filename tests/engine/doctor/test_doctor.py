"""The doctor: what it says of GPUs that are not at hand, of this machine, and among several processes."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch

from lightswitch.doctor.examination import GPU, gpu_lines, look_for_gpus, without_nccl
from tests.engine.conftest import CHECKOUT

GIB = 2**30
FREE = GPU("NVIDIA H100", 70 * GIB, 80 * GIB)
FOUND: dict[str, tuple[list[GPU], str | None, list[str], list[str]]] = {
    "a GPU": (
        [FREE],
        "580.65",
        ["NVIDIA driver 580.65", "GPU 0: NVIDIA H100, 70.0 GiB of 80.0 GiB free"],
        [],
    ),
    "a GPU that others use": (
        [GPU("AMD Instinct MI300X", 10 * GIB, 192 * GIB)],
        None,
        ["GPU 0: AMD Instinct MI300X, 10.0 GiB of 192.0 GiB free"],
        ["GPU 0 has 10.0 GiB of 192.0 GiB free; see who uses it: nvidia-smi"],
    ),
    "Apple": ([GPU("Apple's GPU")], None, ["GPU 0: Apple's GPU"], []),
    "a CPU": ([], None, ["no GPU that torch can use"], []),
    "a driver without a GPU": (
        [],
        "580.65",
        ["NVIDIA driver 580.65", "no GPU that torch can use"],
        [
            f"the NVIDIA driver 580.65 is installed, but torch {torch.__version__} finds no GPU; type nvidia-smi, or "
            "install a CUDA build of torch"
        ],
    ),
    "a GPU that is full": (
        [FREE, GPU(fault="CUDA error: out of memory")],
        None,
        ["GPU 0: NVIDIA H100, 70.0 GiB of 80.0 GiB free", "GPU 1: CUDA error: out of memory"],
        ["GPU 1 can't be used: CUDA error: out of memory; see its state, and who uses it: nvidia-smi"],
    ),
}


@pytest.mark.parametrize("machine", FOUND)
def test_accelerators_are_named_with_what_is_wrong(machine: str) -> None:
    gpus, driver, lines, wrong = FOUND[machine]
    problems: list[str] = []
    assert (list(gpu_lines(gpus, driver, problems)), problems) == (lines, wrong)


def _process(rank: int, local_rank: int, gpus: int) -> dict[str, Any]:
    return {"rank": rank, "node": "node1", "local_rank": local_rank, "gpus": gpus}


@pytest.mark.parametrize(
    ("everyone", "told"),
    [
        ([_process(0, 0, 2), _process(1, 1, 2)], []),
        # by itself, rank 0 would use NCCL, and wait for rank 1
        (
            [_process(0, 0, 1), _process(1, 1, 1)],
            ["rank 1 on node1 sees 1 GPUs for NCCL, but would use number 1, from 0"],
        ),
        (
            [_process(0, 0, 1), _process(1, 0, 0)],
            ["rank 1 on node1 sees 0 GPUs for NCCL, but would use number 0, from 0"],
        ),
    ],
)
def test_nccl_is_tried_by_all_processes_or_none(everyone: list[dict[str, Any]], told: list[str]) -> None:
    assert without_nccl(everyone) == told


@pytest.mark.gpu
def test_a_gpu_is_found_with_its_memory() -> None:
    found = look_for_gpus()
    assert len(found) == torch.cuda.device_count()
    assert all(gpu.fault or 0 < gpu.free_bytes <= gpu.total_bytes for gpu in found)


DOCTOR = ("-m", "lightswitch.doctor", "--timeout", "300")


def asked_of(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(["python", *command], cwd=CHECKOUT, env=environ, capture_output=True, text=True)


@pytest.mark.nightly
def test_alone_it_tells_what_the_machine_has() -> None:
    asked = asked_of(*DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "CPU cores" in asked.stdout
    assert asked.stdout.endswith("no problem was found\n")


@pytest.mark.nightly
def test_two_processes_are_measured_and_told_of_once() -> None:
    asked = asked_of("-m", "torch.distributed.run", "--nproc-per-node=2", *DOCTOR)
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stdout.count("gloo, 16 MiB: ") == 1
    assert asked.stdout.startswith("processes   2, rendezvous at ")


@pytest.mark.nightly
def test_a_rank_that_does_not_come_is_a_problem(port: str) -> None:
    exported = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}
    asked = asked_of("-m", "lightswitch.doctor", "--timeout", "1", **exported)
    assert asked.returncode == 1
    assert asked.stdout.endswith("problem     rank 1 did not join within 1 s\n")
