"""Which devices a request means, on machines that are not at hand: what is there is a value like any other."""

from __future__ import annotations

from typing import Any

import pytest

from lightswitch.cluster.placement import Placement
from lightswitch.preflight import devices, strategies
from lightswitch.preflight.devices import Present

EIGHT_GPUS, ONE_GPU, APPLE, NONE = Present(cuda=8), Present(cuda=1), Present(mps=1), Present()
ALONE, SRUN = Placement("local"), Placement("slurm", nodes=2, devices_per_node=8)
TORCHRUN, EXPORTED = (Placement(launcher, nodes=2, devices_per_node=8) for launcher in ("torchrun", "env"))


def _trainer(accelerator: str, wanted: Any = 1) -> dict[str, Any]:
    return {"accelerator": accelerator, "devices": wanted, "num_nodes": 1}


COUNTED: list[tuple[str, Any, Present, tuple[str, int]]] = [
    ("cpu", "auto", EIGHT_GPUS, ("cpu", 1)),  # Lightning's auto is one process on the CPU, whatever is beside it
    ("auto", "auto", EIGHT_GPUS, ("cuda", 8)),
    ("gpu", -1, EIGHT_GPUS, ("cuda", 8)),
    ("cuda", "2,", EIGHT_GPUS, ("cuda", 1)),
    ("auto", [2, 5], EIGHT_GPUS, ("cuda", 2)),
    ("auto", "auto", APPLE, ("mps", 1)),
    ("gpu", "auto", APPLE, ("mps", 1)),
    ("cpu", "auto", APPLE, ("cpu", 1)),
    ("auto", "auto", NONE, ("cpu", 1)),
    ("auto", 4, NONE, ("cpu", 4)),
    ("gpu", 1, NONE, ("cuda", 1)),
    ("tpu", "auto", EIGHT_GPUS, ("tpu", 1)),
]


@pytest.mark.parametrize(("accelerator", "wanted", "there", "found"), COUNTED)
def test_devices_are_counted_by_the_accelerator_in_use(
    accelerator: str, wanted: Any, there: Present, found: tuple[str, int]
) -> None:
    trainer = _trainer(accelerator, wanted)
    assert (devices.accelerator(trainer, there), devices.count(trainer, there)) == found


ONE_EACH = "started 8 processes on each node, and this one sees 1 GPU: each needs its own; use"
FEWER = "use trainer.devices=1, or trainer.accelerator=cpu for"
ABSENT: list[tuple[str, Any, Placement, Present, str]] = [  # accelerator, devices, launcher, what is there; the line
    ("gpu", 1, ALONE, NONE, "trainer.accelerator=gpu: this machine has none; use trainer.accelerator=cpu"),
    ("auto", 8, ALONE, ONE_GPU, f"trainer.devices=8: this machine has 1 GPU; {FEWER} 8 processes on the CPU"),
    ("auto", 2, ALONE, APPLE, f"trainer.devices=2: this machine has 1 GPU; {FEWER} 2 processes on the CPU"),
    ("cpu", [0], ALONE, EIGHT_GPUS, "trainer.devices=[0] names GPUs, and the run is on the CPU; use a number of "),
    # the number of devices follows from the launcher's, so that another trainer.devices would be refused, too
    (
        "auto",
        8,
        SRUN,
        ONE_GPU,
        f"slurm {ONE_EACH} --ntasks-per-node=1, or show it all (CUDA_VISIBLE_DEVICES, srun --gpus-per-node=N)",
    ),
    ("auto", 8, TORCHRUN, ONE_GPU, f"torchrun {ONE_EACH} --nproc-per-node=1, or show it all ("),
    ("auto", 8, EXPORTED, ONE_GPU, f"env {ONE_EACH} LOCAL_WORLD_SIZE=1, or show it all ("),
    *(
        ("auto", wanted, ALONE, EIGHT_GPUS, f"trainer.devices={wanted}: use a number from 1, a list of GPUs such as ")
        for wanted in (0, "0", -2, [], ",", [-1], "a,b", "many")
    ),
    ("gpu", 8, ALONE, EIGHT_GPUS, ""),
    ("auto", [7], ALONE, EIGHT_GPUS, ""),
    ("auto", "auto", ALONE, EIGHT_GPUS, ""),
]


@pytest.mark.parametrize(("accelerator", "wanted", "place", "there", "told"), ABSENT)
def test_a_device_that_is_not_there_is_refused_with_what_to_type(
    accelerator: str, wanted: Any, place: Placement, there: Present, told: str
) -> None:
    trainer = _trainer(accelerator, wanted)
    lines = [*devices.wrong_counts(trainer)] or [*devices.absent(trainer, place, there)]
    assert len(lines) == bool(told)
    assert "".join(lines).startswith(told)


GROUP = "runs on CUDA devices and on the CPU"
FIRST = "DeepSpeed uses the first visible GPUs; export CUDA_VISIBLE_DEVICES=2,3, and use trainer.devices=2"
STRATEGIES: list[tuple[str, str, Any, str]] = [
    *((target, "mps", 1, f"strategy {target} {GROUP}") for target in ("DDP", "FSDP", "TensorParallel", "DeepSpeed")),
    *((target, kind, 1, "") for target in ("DDP", "FSDP", "DeepSpeed") for kind in ("cpu", "cuda")),
    ("Single", "mps", 1, ""),
    *(("DeepSpeed", "cuda", named, f"trainer.devices={named}: {FIRST}") for named in ([2, 3], "2,3")),
    ("DeepSpeed", "cuda", [0, 1], ""),
    ("DDP", "cuda", [2, 3], ""),
]


@pytest.mark.parametrize(("target", "accelerator", "wanted", "told"), STRATEGIES)
def test_devices_that_a_strategy_would_not_take_are_refused(
    target: str, accelerator: str, wanted: Any, told: str
) -> None:
    trainer = {**_trainer(accelerator, wanted), "precision": "32-true"}
    strategy = {"_target_": target, "tensor_parallel_size": 1, "plans": {"None": ""}}
    lines = list(strategies.problems(strategies.Request(strategy, {}, trainer, 1, 1, accelerator)))
    assert (len(lines), told in "".join(lines)) == (bool(told), True)


DETECT, BY_HAND = (f"lightswitch.cluster.environments.{name}" for name in ("detect", "by_hand"))


@pytest.mark.parametrize(
    ("size", "place", "cluster", "is_refused"),
    [
        pytest.param("OMPI_COMM_WORLD_SIZE=2", ALONE, DETECT, True, id="mpirun"),
        pytest.param("PMI_SIZE=2", ALONE, DETECT, True, id="mpiexec"),
        pytest.param("PMI_SIZE=1", ALONE, DETECT, False, id="of one process"),
        pytest.param("OMPI_COMM_WORLD_SIZE=2", ALONE, BY_HAND, False, id="cluster=manual"),
        pytest.param("PMI_SIZE=2", Placement("slurm", 1, 2), DETECT, False, id="srun --mpi=pmi2"),
    ],
)
def test_processes_of_mpi_that_would_be_runs_of_their_own_are_refused(
    size: str, place: Placement, cluster: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*size.split("="))
    trainer = {"num_nodes": place.nodes, "devices": place.devices_per_node or 1}
    lines = list(devices.process_problems({"cluster": {"_target_": cluster}, "trainer": trainer}, place))
    assert [line.startswith(f"{size}: mpi") for line in lines] == [True] * is_refused
