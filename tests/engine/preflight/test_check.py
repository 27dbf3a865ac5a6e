"""What is wrong with a request, told at once and before a process is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.engine.conftest import PLAIN, PLAIN_DATA, PLAIN_MODEL, Train
from tests.engine.requests import composed, composing, problems
from tests.engine.tiny import LANGUAGE_MODEL, TEXT

Refusals = Callable[..., set[str]]
NO_CHECKPOINT = (
    "every checkpoint callback was removed, and Lightning would add its default one; "
    "also set trainer.enable_checkpointing=false to train without checkpoints"
)
REFUSED = {
    "global_batch_size=0": "global_batch_size 0 and micro_batch_size None: both are numbers of samples, and must be at "
    "least 1",
    "strategy=ddp trainer.strategy.static_graph=true trainer.strategy.find_unused_parameters=true": "trainer.strategy."
    "static_graph finds unused parameters itself; leave find_unused_parameters out",
    "trainer.num_nodes=2": "trainer.num_nodes=2: no launcher has started the processes of 2 nodes; start it with srun "
    "or torchrun, and leave trainer.num_nodes out, or start it on each node by the same command with "
    "cluster=manual cluster.node_rank=N cluster.main_address=FIRST_NODE",
    "strategy=single trainer.devices=2": "strategy=single uses one device, but 1 × 2 are requested; use strategy=ddp",
    "strategy=fsdp trainer.sync_batchnorm=true": "trainer.sync_batchnorm=true needs GPUs, because torch's "
    "SyncBatchNorm does; leave it out on CPUs",
    "trainer.accelerator=gqu": "trainer.accelerator=gqu is not supported. Did you mean gpu? "
    "Choices: auto, gpu, cuda, mps, cpu",
    "trainer.accelerator=tpu": "trainer.accelerator=tpu is not supported. Did you mean gpu? "
    "Choices: auto, gpu, cuda, mps, cpu",
    "trainer.accelerator=cpu trainer.devices=-1": "trainer.devices=-1 names GPUs, and the run is on the CPU; "
    "use a number of processes or auto",
    "trainer.accelerator=cpu precision=16-mixed": "precision=16-mixed is for GPUs, and Lightning would put bf16-mixed "
    "in its place; use that on the CPU",
    "lr_scaling.rule=linear": "lr_scaling.rule=linear scales optimizer.lr, which nothing in model refers to; set the "
    "model's rate with 'model.lr=${optimizer.lr}' (or the model's name for it), or leave lr_scaling out",
    "trainer.accumulate_grad_batches=2": "trainer.accumulate_grad_batches is set by the batch: "
    "type micro_batch_size=N, where N is global_batch_size / (devices × 2)",
    "trainer.logger=false": "trainer.logger is set by the group logger: type logger=[default,mlflow] or "
    "~logger.tensorboard",
    "trainer.max_steps=???": "trainer.max_steps: there is no default; type trainer.max_steps=VALUE",
    "strategy=ddp trainer.strategy.tensor_parallel_size=2": "trainer.strategy.tensor_parallel_size: DDP takes no "
    "tensor_parallel_size; type strategy=fsdp_tp trainer.strategy.tensor_parallel_size=2",
    "mode=test": "mode=test needs ckpt_path=PATH of a checkpoint",
    "mode=test ckpt_path=nowhere.ckpt": "ckpt_path=nowhere.ckpt: there is no such file",
    "run_id=mine mode=test ckpt_path=best": "ckpt_path=best refers to run_id=mine, which has no such file; type "
    "run_id=RUN_ID of the run that has it, or its path",
    "resume=": "resume is empty; leave it out, or name a checkpoint",
    "resume=nowhere.ckpt": "resume=nowhere.ckpt: there is no such file",
    "~callbacks.best_checkpoint ~callbacks.last_checkpoint": NO_CHECKPOINT,
    "logger=null": "callbacks.lr_monitor writes to a logger, and every logger was removed; "
    "also type ~callbacks.lr_monitor",
    "cluster=torchrun trainer.devices=2": "cluster=torchrun, but torchrun did not start this process; "
    "start it with torchrun --nproc-per-node=N train.py or leave cluster out",
    "cluster=slurm trainer.devices=2": "cluster=slurm, but slurm did not start this process; "
    "start it with srun python train.py or leave cluster out",
}


SEVERAL = (
    *("strategy=ddp", "trainer.strategy.static_graph=true", "trainer.strategy.find_unused_parameters=true"),
    *("global_batch_size=0", "mode=test", "ckpt_path=nowhere.ckpt"),
    *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "trainer.accelerator=gqu"),
)


@pytest.fixture
def refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusals]:
    monkeypatch.chdir(tmp_path)
    with composing():
        yield lambda *words: problems(composed(*words, into=tmp_path / "runs/plainmodel/mine"))


@pytest.mark.parametrize("request_", REFUSED)
def test_a_request_that_cannot_be_met_is_refused_in_a_line(request_: str, refusals: Refusals) -> None:
    on_cpu = () if "accelerator" in request_ else ("trainer.accelerator=cpu",)
    assert refusals(*PLAIN, *on_cpu, *request_.split()) == {REFUSED[request_]}


REFUSED_AS_IT_STARTS = {
    "trainer.accelerator=gpu": "trainer.accelerator=gpu: this machine has none; use trainer.accelerator=cpu",
    "cluster=env": "cluster: MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK not exported; "
    "each process needs MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK",
    "trainer.limit_val_batches=2.5": "trainer: You have passed invalid value 2.5 for limit_val_batches, "
    "it has to be in [0.0, 1.0] or an int.",
}


@pytest.mark.parametrize("request_", REFUSED_AS_IT_STARTS)
def test_a_refused_request_is_a_line_and_leaves_nothing(request_: str, train: Train) -> None:
    on_cpu = () if "accelerator" in request_ else ("trainer.accelerator=cpu",)
    refused = train(*PLAIN, *on_cpu, request_, check=False)
    assert refused.err == f"error: {REFUSED_AS_IT_STARTS[request_]}\n"
    assert (refused.returncode, refused.out, list(refused.folder.iterdir())) == (2, "", [])


@pytest.mark.parametrize(
    ("optimizer", "eps"), [("optimizer=adamw", "default eps"), ("optimizer=adam optimizer.eps=1e-5", "eps=1e-05")]
)
def test_an_eps_that_float16_does_not_hold_is_refused(optimizer: str, eps: str, refusals: Refusals) -> None:
    (told,) = refusals(*LANGUAGE_MODEL, TEXT, "precision=16-true", *optimizer.split())
    assert f"and the {eps} is below float16's smallest number, 6.1e-05; use optimizer.eps=1e-4" in told


class Own:
    def __init__(self, optimizer: object = "adam") -> None: ...


OWN = (PLAIN_DATA, f"model._target_={__name__}.Own", "trainer.accelerator=cpu", "~optimizer", "~scheduler")
TAKEN = {
    "a nested config that the code instantiates": "model._recursive_=false model.optimizer._target_=torch.optim.SGD",
    "the name of an optimizer": "model.optimizer=adam strategy=deepspeed_stage_2 trainer.devices=2",
}


@pytest.mark.parametrize("words", TAKEN)
def test_what_code_of_others_may_take_is_taken(words: str, refusals: Refusals) -> None:
    assert refusals(*OWN, *TAKEN[words].split()) == set()


def test_a_config_without_the_group_of_optimizers_is_checked(refusals: Refusals) -> None:
    (told,) = refusals(*OWN, "precision=16-true", *(f"model.optimizer.{one}" for one in ADAM))
    assert "use model.optimizer.eps=1e-4, or precision=bf16-true" in told


ADAM = ("_target_=torch.optim.Adam", "_partial_=true")
WRITTEN = {  # in a file of conf, whose types are checked before what relies on them
    "callbacks": (["my"], "callbacks: found list, expected a name for each; type callbacks.NAME._target_=my.Class"),
    "trainer.strategy.bucket_cap_mb": ("25", "trainer.strategy.bucket_cap_mb=25: found str, expected float or null"),
}


@pytest.mark.parametrize("key", WRITTEN)
def test_what_a_config_says_of_another_type_is_refused_in_a_line(key: str, refusals: Refusals, tmp_path: Path) -> None:
    value, line = WRITTEN[key]
    request = composed(*PLAIN, "trainer.accelerator=cpu", "strategy=ddp", into=tmp_path)
    OmegaConf.update(request.cfg, key, value, merge=False)
    assert problems(request) == {line}


def test_all_problems_are_told_at_once(refusals: Refusals) -> None:
    assert refusals(*PLAIN, *SEVERAL) == {
        REFUSED["global_batch_size=0"],
        "trainer.strategy.static_graph finds unused parameters itself; leave find_unused_parameters out",
        NO_CHECKPOINT,
        "ckpt_path=nowhere.ckpt: there is no such file",
        REFUSED["trainer.accelerator=gqu"],
    }


@pytest.mark.gpu
def test_more_gpus_than_there_are_are_refused(train: Train) -> None:
    there, asked = torch.cuda.device_count(), torch.cuda.device_count() + 1
    refused = train(*PLAIN, f"trainer.devices={asked}", f"global_batch_size={asked}", check=False)
    assert refused.refusal.startswith(f"trainer.devices={asked}: this machine has {there} GPU")


def test_a_file_in_the_place_of_the_run_directory_is_told(train: Train, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    refused = train(*PLAIN, folder=tmp_path, check=False)
    assert refused.refusal.startswith("the run directory can't be made: [Errno ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_directory_without_permission_is_told(train: Train, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o555)
    refused = train(*PLAIN, folder=tmp_path, check=False)
    assert refused.refusal.startswith("the run directory can't be made: [Errno 13] Permission denied")


UNREADABLE = "can't be read as a checkpoint"
NO_CHECKPOINTS = {
    "mode=test ckpt_path=README.md": f"README.md {UNREADABLE}: README.md is damaged, or was not written by torch.save",
    "ckpt_path=notes": f"notes {UNREADABLE}: it has no SHA256SUMS, or a damaged one",
    "ckpt_path=runs/mlp/done": "ckpt_path=runs/mlp/done: found a folder with checkpoints, expected a checkpoint; type "
    "ckpt_path=runs/mlp/done/checkpoints/last.ckpt",
    "resume=README.md": f"README.md {UNREADABLE}: README.md is damaged, or was not written by torch.save",
    "init_from=odd.safetensors": f"odd.safetensors {UNREADABLE}: Error while deserializing header: header too small",
}


@pytest.mark.parametrize("request_", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_told_in_a_line(request_: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "runs/mlp/done/checkpoints/last.ckpt").mkdir(parents=True)
    for name in ("README.md", "odd.safetensors"):
        (tmp_path / name).write_text("text")
    refused = train(*PLAIN, "trainer.accelerator=cpu", *request_.split(), folder=tmp_path, check=False)
    assert refused.refusal == NO_CHECKPOINTS[request_]


def test_a_run_without_data_is_refused(train: Train) -> None:
    refused = train(PLAIN_MODEL, "~data", "trainer.accelerator=cpu", check=False)
    assert refused.refusal == "there is no data, and PlainModel has no train_dataloader; type data=NAME"


CONSTRUCTORS = """
from torch import nn
from tests.engine.plain import PlainModel

class Loose(PlainModel):
    def __init__(self, width=64, depth=None) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2)

class Lacking(PlainModel):
    def __init__(self) -> None:
        import torchvison
"""


IN_A_LINE = {
    "model._target_=constructors.Loose model.width=abc": "model.width=abc: found str, expected a value like 64; Loose "
    "declares no type for it, and fails: TypeError: ",
    "model._target_=constructors.Lacking": "model._target_=constructors.Lacking: importing it fails: No module named "
    "'torchvison'\n",
    "model._target_=lacking.Model": "model._target_=lacking.Model: importing it fails: No module named 'torchvison'\n",
}


@pytest.mark.parametrize("typed", IN_A_LINE)
def test_what_a_constructor_lacks_is_a_line_that_ends_with_it(typed: str, train: Train, tmp_path: Path) -> None:
    (tmp_path / "constructors.py").write_text(CONSTRUCTORS)
    (tmp_path / "lacking.py").write_text("import torchvison\nclass Model: pass\n")
    refused = train(*typed.split(), PLAIN_DATA, folder=tmp_path, check=False)
    assert refused.err.startswith(f"error: {IN_A_LINE[typed]}")
    assert (refused.returncode, refused.err.count("\n")) == (2, 1)
