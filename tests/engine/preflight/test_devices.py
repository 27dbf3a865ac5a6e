"""Which devices a request means, on machines that are not at hand: what is there is a value like any other."""

from __future__ import annotations

from typing import Any

import pytest

from lightswitch.cluster.placement import Placement
from lightswitch.preflight import devices, strategies, trainer
from lightswitch.preflight.devices import Present

EIGHT_GPUS, ONE_GPU, APPLE, NONE = Present(cuda=8), Present(cuda=1), Present(mps=1), Present()
ALONE = Placement("local")


def _trainer(accelerator: str, wanted: Any = 1) -> dict[str, Any]:
    return {"accelerator": accelerator, "devices": wanted, "num_nodes": 1}


@pytest.mark.parametrize(
    ("accelerator", "wanted", "there", "found"),
    [
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
    ],
)
def test_devices_are_counted_by_the_accelerator_in_use(
    accelerator: str, wanted: Any, there: Present, found: tuple[str, int]
) -> None:
    trainer = _trainer(accelerator, wanted)
    assert (devices.accelerator(trainer, there), devices.count(trainer, there)) == found


ABSENT = (
    (
        _trainer("gpu"),
        NONE,
        "trainer.accelerator=gpu: this machine has none; use trainer.accelerator=cpu",
    ),
    (
        _trainer("auto", 8),
        ONE_GPU,
        "trainer.devices=8: this machine has 1 GPU; use trainer.devices=1, "
        "or trainer.accelerator=cpu for 8 processes on the CPU",
    ),
    (
        _trainer("auto", 2),
        APPLE,
        "trainer.devices=2: this machine has 1 GPU; use trainer.devices=1, "
        "or trainer.accelerator=cpu for 2 processes on the CPU",
    ),
    (
        _trainer("auto", [0, 8]),
        EIGHT_GPUS,
        "trainer.devices=[0, 8]: this machine has 8 GPUs, numbered from 0; use numbers below 8",
    ),
    (
        _trainer("cpu", [0]),
        EIGHT_GPUS,
        "trainer.devices=[0] names GPUs, and the run is on the CPU; use a number of processes or auto",
    ),
)


@pytest.mark.parametrize(("trainer", "there", "told"), ABSENT)
def test_a_device_that_is_not_there_is_refused_with_what_to_type(
    trainer: dict[str, Any], there: Present, told: str
) -> None:
    assert list(devices.absent(trainer, ALONE, there)) == [told]


@pytest.mark.parametrize(
    ("launcher", "advice"),
    [
        ("slurm", "use --ntasks-per-node=1, or --gpus-per-node=8 in place of --gpus-per-task"),
        ("torchrun", "use --nproc-per-node=1, or list 8 GPUs in CUDA_VISIBLE_DEVICES"),
        ("env", "export LOCAL_WORLD_SIZE=1 and start that many ranks, or list 8 GPUs in CUDA_VISIBLE_DEVICES"),
    ],
)
def test_one_visible_gpu_a_task_is_told_to_its_launcher(launcher: str, advice: str) -> None:
    """The number of devices follows from the launcher's, so that another trainer.devices would be refused, too."""
    place = Placement(launcher, nodes=2, devices_per_node=8)
    started = f"{launcher} started 8 processes on each node, and this one sees 1 GPU"
    assert list(devices.absent(_trainer("auto", 8), place, ONE_GPU)) == [
        f"{started}: each process needs its own GPU; {advice}"
    ]


@pytest.mark.parametrize(
    ("place", "used", "advice"),
    [
        (Placement("slurm", nodes=2, devices_per_node=1), 1, ["type srun --ntasks-per-node=8"]),
        (Placement("slurm", nodes=2, devices_per_node=8), 8, []),
        (Placement("torchrun", nodes=2, devices_per_node=1), 1, []),
        (ALONE, 1, ["type trainer.devices=8, or srun --ntasks-per-node=8"]),
    ],
)
def test_gpus_that_srun_leaves_idle_are_told(
    place: Placement, used: int, advice: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1" if place == ALONE else "16")
    told = f"this node has 8 GPUs, and the run uses {used}: srun has started no more processes; "
    assert list(devices.idle(used, place, EIGHT_GPUS)) == [told + typed for typed in advice]


@pytest.mark.parametrize("trainer", [_trainer("gpu", 8), _trainer("auto", [7]), _trainer("auto", "auto")])
def test_what_is_there_is_not_refused(trainer: dict[str, Any]) -> None:
    assert [*devices.wrong_counts(trainer), *devices.absent(trainer, ALONE, EIGHT_GPUS)] == []


@pytest.mark.parametrize("wanted", [0, "0", -2, [], ",", [-1], "a,b", "many"])
def test_what_is_no_number_of_devices_is_refused(wanted: Any) -> None:
    told = f"trainer.devices={wanted}: use a number from 1, a list of GPUs such as [0,1], -1 or auto"
    assert list(devices.wrong_counts(_trainer("auto", wanted))) == [told]


def test_a_gpu_named_twice_is_refused() -> None:
    (told,) = devices.wrong_counts(_trainer("auto", [1, 1]))
    assert told.startswith("trainer.devices=[1, 1]: a GPU is listed twice")


def _told(target: str, accelerator: str, wanted: Any = 1) -> list[str]:
    trainer = {**_trainer(accelerator, wanted), "precision": "32-true"}
    strategy = {"_target_": target, "tensor_parallel_size": 1, "plans": {"None": ""}}
    return list(strategies.problems(strategies.Request(strategy, {}, trainer, 1, 1, accelerator)))


@pytest.mark.parametrize("target", ["DDP", "FSDP", "TensorParallel", "DeepSpeed"])
def test_processes_that_need_a_group_are_refused_on_apples_gpus(target: str) -> None:
    (told,) = _told(target, "mps")
    assert told.startswith(f"strategy {target} runs on CUDA devices and on the CPU")
    assert told.endswith("use strategy=single, or trainer.accelerator=cpu")
    assert _told(target, "cpu") == _told(target, "cuda") == _told("Single", "mps") == []


@pytest.mark.parametrize("named", [[2, 3], "2,3"])
def test_gpus_that_deepspeed_would_not_take_are_refused(named: Any) -> None:
    assert _told("DeepSpeed", "cuda", named) == [
        f"trainer.devices={named}: DeepSpeed uses the first visible GPUs; export CUDA_VISIBLE_DEVICES=2,3, "
        "and use trainer.devices=2"
    ]
    assert _told("DeepSpeed", "cuda", [0, 1]) == _told("DDP", "cuda", named) == []


@pytest.mark.parametrize(
    ("size", "place", "cluster", "is_refused"),
    [
        ("OMPI_COMM_WORLD_SIZE=2", ALONE, "lightswitch.cluster.environments.detect", True),
        ("PMI_SIZE=2", ALONE, "lightswitch.cluster.environments.detect", True),
        ("PMI_SIZE=1", ALONE, "lightswitch.cluster.environments.detect", False),
        ("OMPI_COMM_WORLD_SIZE=2", ALONE, "lightswitch.cluster.environments.by_hand", False),
        ("PMI_SIZE=2", Placement("slurm", 1, 2), "lightswitch.cluster.environments.detect", False),
    ],
    ids=["mpirun", "mpiexec", "of one process", "cluster=manual", "srun --mpi=pmi2"],
)
def test_processes_of_mpi_that_would_be_runs_of_their_own_are_refused(
    size: str, place: Placement, cluster: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*size.split("="))
    lines = list(devices.separate({"cluster": {"_target_": cluster}}, place))
    assert [line.startswith(f"{size}: mpi") for line in lines] == [True] * is_refused


def test_apples_gpus_have_no_double_precision() -> None:
    cfg = {"trainer": {"precision": "64-true"}, "mode": "fit", "model": {}, "optimizer": {}}
    (told,) = trainer.precision_problems(cfg, "mps")
    assert told == "precision=64-true: Apple's GPUs have no 64-bit floats; use 32-true, or trainer.accelerator=cpu"
    assert list(trainer.precision_problems(cfg, "cuda")) == []
