"""The doctor: what it says of GPUs that are not at hand, of this machine, and among several processes."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch

from lightswitch.doctor.examination import Listener, reach
from lightswitch.doctor.machine import GPU, Accelerators, gpu_lines, gpu_problems, look_for_gpus, without_nccl
from tests.engine.conftest import CHECKOUT

GIB = 2**30
FREE = GPU("NVIDIA H100", 70 * GIB, 80 * GIB)
FOUND = {
    "NVIDIA": (
        Accelerators("CUDA 13.0", "580.65", [FREE]),
        ["NVIDIA driver 580.65", "CUDA 13.0", "GPU 0: NVIDIA H100, 70.0 GiB of 80.0 GiB free"],
        [],
    ),
    "AMD": (
        Accelerators("ROCm 7.0", None, [GPU("AMD Instinct MI300X", 10 * GIB, 192 * GIB)]),
        ["ROCm 7.0", "GPU 0: AMD Instinct MI300X, 10.0 GiB of 192.0 GiB free"],
        ["GPU 0 has 10.0 GiB of 192.0 GiB free; see who uses it: rocm-smi"],
    ),
    "Apple": (Accelerators("MPS", None, [GPU("Apple's GPU")]), ["MPS", "GPU 0: Apple's GPU"], []),
    "a CPU": (Accelerators(), ["no GPU that torch can use"], []),
    "a GPU beside a torch for CPUs": (
        Accelerators("", "580.65"),
        ["NVIDIA driver 580.65", "no GPU that torch can use"],
        ["an NVIDIA driver is installed, but torch was built for CPUs only; install a CUDA build of torch"],
    ),
    "a driver without a GPU": (
        Accelerators("CUDA 13.0", "580.65"),
        ["NVIDIA driver 580.65", "CUDA 13.0", "no GPU that torch can use"],
        ["the NVIDIA driver 580.65 is installed, but torch finds no GPU; type nvidia-smi"],
    ),
    "a GPU that is busy": (
        Accelerators("CUDA 13.0", None, [FREE, GPU(fault="CUDA error: out of memory")]),
        ["CUDA 13.0", "GPU 0: NVIDIA H100, 70.0 GiB of 80.0 GiB free", "GPU 1: CUDA error: out of memory"],
        ["GPU 1 can't be used: CUDA error: out of memory; see its state, and who uses it: nvidia-smi"],
    ),
}


@pytest.mark.parametrize("machine", FOUND)
def test_accelerators_are_named_with_what_is_wrong(machine: str) -> None:
    found, holdings, wrong = FOUND[machine]
    assert (list(gpu_lines(found)), list(gpu_problems(found))) == (holdings, wrong)


def _process(rank: int, local_rank: int, gpus: int, backends: tuple[str, ...] = ("gloo", "nccl")) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": "node1",
        "local_rank": local_rank,
        "gpus_for_nccl": gpus,
        "backends": backends,
    }


@pytest.mark.parametrize(
    ("everyone", "told"),
    [
        ([_process(0, 0, 2), _process(1, 1, 2)], []),
        # by itself, rank 0 would use NCCL, and wait for rank 1
        ([_process(0, 0, 1), _process(1, 1, 1)], ["rank 1 on node1 sees 1 GPU, but would use number 1, from 0"]),
        ([_process(0, 0, 1), _process(1, 0, 0)], ["rank 1 on node1 sees 0 GPUs, but would use number 0, from 0"]),
        ([_process(0, 0, 1), _process(1, 0, 1, ("gloo",))], ["rank 1 on node1 has a torch without NCCL"]),
    ],
)
def test_nccl_is_tried_by_all_processes_or_none(everyone: list[dict[str, Any]], told: list[str]) -> None:
    assert without_nccl(everyone) == told


@pytest.mark.gpu
def test_a_gpu_is_found_with_its_memory() -> None:
    found = look_for_gpus()
    assert len(found.gpus) == torch.cuda.device_count()
    assert all(gpu.fault or 0 < gpu.free_bytes <= gpu.total_bytes for gpu in found.gpus)


@pytest.mark.parametrize(("main_address", "is_reached"), [("127.1", True), ("localhost", False), ("127.0.0.1", False)])
def test_rank_0_is_reached_by_its_name_also_where_its_own_hosts_file_names_the_loopback(
    main_address: str, is_reached: bool
) -> None:
    """127.1 is resolved like a host's name, to the loopback; 127.0.0.2 is another address of this machine."""
    host, port = Listener(main_address).address
    assert host == (main_address if is_reached else "127.0.0.1")
    assert (reach({"other": ("127.0.0.2", port)})["other"] == "") == is_reached


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
