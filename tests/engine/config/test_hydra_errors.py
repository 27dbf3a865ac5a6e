"""RefusedRequest in what was typed: one line each, exit code 2, before torch is imported."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightswitch.config import hydra_errors
from tests.engine.config.mistaken import TRAIN, Answer, answers
from tests.engine.conftest import CHECKOUT, PLAIN

PRECISIONS = "16-mixed, 16-true, 32-true, 64-true, bf16-mixed, bf16-true"
STRATEGIES = ", ".join(sorted(path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml")))
READ = ("seed", "mode", "objective", "resume", "meet_timeout_seconds", "global_batch_size", "lr_scaling", "watch")
READ = (*READ, "lr_scaling.rule", "watch.lost_after_seconds", "trainer.devices", "trainer.num_nodes")
MISTAKES = {
    "strategy=fdsp": f"strategy=fdsp: there is no such strategy. Did you mean fsdp? Choices: {STRATEGIES}",
    "strategy=deepspeed_stage_3_offload_nvme": "strategy=deepspeed_stage_3_offload_nvme: it was taken out, as "
    "checkpoints can't hold its state; use strategy=deepspeed_stage_3_offload",
    "strategy=dp": "strategy=dp: DataParallel is gone from Lightning; use strategy=ddp, which starts a process for "
    "each device",
    "strategy=fsdp2": "strategy=fsdp2: use strategy=fsdp, which is FSDP2; the older one is strategy=fsdp1",
    "precision=bf16": f"precision=bf16: there is no such precision. Did you mean bf16-mixed? Choices: {PRECISIONS}",
    "precision=16": f"precision=16: there is no such precision. Did you mean 16-mixed? Choices: {PRECISIONS}",
    "callbacks=[default,early_stoping]": "callbacks=early_stoping: there is no such callbacks. "
    "Did you mean early_stopping? Choices: checkpoint, default, device_monitor, early_stopping, grad_norm, "
    "lr_monitor, model_summary, progress, step_times, throughput, trainable_only",
    "debug=one_bach": "debug=one_bach: there is no such debug. Did you mean one_batch? "
    "Choices: anomaly, limit, one_batch, overfit, profiler",
    "trainer.strategy=fdsp": f"strategy=fdsp: there is no such strategy. Did you mean fsdp? Choices: {STRATEGIES}",
    "strategy=zero3": "strategy=zero3: there is no such strategy. Did you mean deepspeed_stage_3? "
    f"Choices: {STRATEGIES}",
    **{
        f"{word}=3": f"{word}: there is no such key. Did you mean {key}?"
        for word, key in {
            "lr": "optimizer.lr",
            "learning_rate": "optimizer.lr",
            "batch_size": "global_batch_size",
            "epochs": "trainer.max_epochs",
            "max_steps": "trainer.max_steps",
            "gpus": "trainer.devices",
            "gradient_accumulation_steps": "micro_batch_size",
            "max_grad_norm": "trainer.gradient_clip_val",
            "lost_after_seconds": "watch.lost_after_seconds",
            "stratgy": "strategy",
            "debg": "debug",
        }.items()
    },
    "trainer.gpus=3": "trainer.gpus: Trainer takes no gpus. Did you mean devices?",
    "trainer.epochs=3": "trainer.epochs: Trainer takes no epochs. Did you mean max_epochs?",
    "optimizer.learning_rate=3": "optimizer.learning_rate: AdamW takes no learning_rate. Did you mean lr?",
    "optimizer.lr=-1e-3": "optimizer.lr=-0.001: a learning rate is a number, at least 0",
    "optimizer.lr=abc": "optimizer.lr=abc: a learning rate is a number, at least 0",
    "cluster=slurm": "cluster=slurm, and slurm did not start this process; start it by srun python train.py, or leave "
    "cluster out",
    "--strategy=ddp": "unrecognized arguments: --strategy=ddp; type strategy=ddp, and --help lists what there is",
    "seeed=3": "seeed: there is no such key. Did you mean seed?",
    "+seeed=3": "seeed: there is no such key. Did you mean seed?",
    "trainer.max_stps=1": "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?",
    "+trainer.max_stps=1": "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?",
    "model.wdth=3": "model.wdth: PlainModel takes no wdth. Did you mean width?",
    "data.sample=3": "data.sample: PlainData takes no sample. Did you mean samples?",
    "callbacks.throughput.every=3": "callbacks.throughput.every: Throughput takes no every.",
    "callbacks.early_stopping.patience=3": "callbacks.early_stopping is not switched on. "
    "To switch it on: callbacks=[default,early_stopping]",
    "callbacks.throughputt.x=3": "callbacks.throughputt is not switched on. Did you mean throughput? "
    "To switch it on: callbacks=[default,throughputt]",
    "strategy=ddp trainer.strategy.start_methd=fork": "trainer.strategy.start_methd: DDP takes no start_methd. "
    "Did you mean start_method?",
    "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping": "callbacks.stop.monitor: "
    "EarlyStopping needs it; give callbacks.stop.monitor=VALUE",
    "model._target_=tests.engine.plain.PlainModl": "model._target_=tests.engine.plain.PlainModl: "
    "tests.engine.plain has no PlainModl",
    "model._target_=tests.plan.PlainModel": "model._target_=tests.plan.PlainModel: there is no module tests.plan",
    "trainer.max_steps=many": "trainer.max_steps=many: found str, expected int",
    "trainer.devices=2.5": "trainer.devices=2.5: found float, expected int or list or str",
    "trainer.precision=12": "trainer.precision=12: found int, expected 16, 16-mixed, 16-true, 32, 32-true, 64, "
    "64-true, bf16, bf16-mixed, bf16-true, transformer-engine, transformer-engine-float16, null",
    "strategy=fsdp trainer.strategy.sharding_strategy=full_shrd": "trainer.strategy.sharding_strategy=full_shrd: "
    "found str, expected FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP. Did you mean FULL_SHARD?",
    "model.width=3.5": "model.width=3.5: found float, expected int",
    "seed=abc": "seed=abc: found str, expected int",
    "watch.lost_after_seconds=0": "watch.lost_after_seconds=0: it is a time in seconds, above 0",
    "seed=-1": "seed=-1: use one from 0 to 4294967295, as NumPy needs it",
    "global_batch_size=ten": "global_batch_size=ten: found str, expected int",
    "mode=train": "mode=train: use one of fit, validate, test, predict, plan, dry_run",
    "lr_scaling.rule=cubic": "lr_scaling.rule is 'cubic'; use one of: none, linear, sqrt",
    "lr_scaling.reference_batch_size=0": "lr_scaling.reference_batch_size=0: it counts samples, so it is at least 1",
    "trainer.num_nodes=0": "trainer.num_nodes=0: use a number from 1",
    "trainer.devices=0": "trainer.devices=0: use a number from 1, a list of GPUs such as [0,1], -1 or auto",
    "trainer.devices=two": "trainer.devices=two: use a number from 1, a list of GPUs such as [0,1], -1 or auto",
    "cluster=manual cluster.node_rank=0": "cluster.main_address: there is no default; type cluster.main_address=VALUE",
    "model.width=${data.width}": "model.width: Interpolation key 'data.width' not found; "
    "make another choice, or type model.width=VALUE",
    "stratgy=ddp": "stratgy: there is no such key. Did you mean strategy?",
    "+stratgy=ddp": "stratgy: there is no such key. Did you mean strategy?",
    "~stratgy": "~stratgy: there is no such key. Did you mean strategy?",
    "trainer.max_steps": "trainer.max_steps: it has no value; type trainer.max_steps=VALUE",
    "strategy": "strategy: it has no value; type strategy=VALUE",
    "--nosuch": "unrecognized arguments: --nosuch; a setting is KEY=VALUE, and --help lists what there is",
    "--resolve=yes": "argument --resolve: ignored explicit argument 'yes'; "
    "a setting is KEY=VALUE, and --help lists what there is",
    "trainer.devices=[0": "trainer.devices=[0: no viable alternative at input '[0'",
    "~callbacks.thruput": "~callbacks.thruput: there is no such key. Did you mean throughput?",
    "~callbcks": "~callbcks: there is no such key. Did you mean callbacks?",
    **{f"~{key}": f"{key}: the config has no such key, and the engine reads it; add it to config.yaml" for key in READ},
    "~name": "hydra.run.dir: Interpolation key 'name' not found; give the config that key",
    "~run_id": "hydra.run.dir: Interpolation key 'run_id' not found; give the config that key",
    "~init_from": "~init_from: it is null already; leave that out",
    "+watch.lost_after=3": "watch.lost_after: there is no such key. Did you mean lost_after_seconds?",
    "+lr_scaling.reference=3": "lr_scaling.reference: there is no such key. Did you mean reference_batch_size?",
    "hydra.run.dir=/proc/run": "the run directory can't be made: [Errno 2] No such file or directory: '/proc/run'",
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    commands = {mistake: [*PLAIN, *mistake.split()] for mistake in MISTAKES}
    commands["several"] = [*PLAIN, "trainer.max_stps=1", "seed=x", "mode=train", "model.wdth=3"]
    commands["from the environment"] = ["API_KEY=marker123456", *PLAIN, "strategy=${oc.env:API_KEY}"]
    commands["--help"] = ["--help"]
    commands["--cfg"] = ["strategy=ddp", "--cfg", "job"]
    return answers(commands, tmp_path_factory.mktemp("mistaken"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_a_line_before_torch_is_imported(mistake: str, answered: dict[str, Answer]) -> None:
    answer = answered[mistake]
    assert answer.err == f"error: {MISTAKES[mistake]}\n"
    assert (answer.returncode, answer.out) == (2, "")
    assert answer.imported == []
    assert answer.left == []


def test_a_choice_from_the_environment_is_named_without_its_value(answered: dict[str, Answer]) -> None:
    assert answered["from the environment"].err.startswith(
        "error: strategy=${oc.env:API_KEY}: there is no such strategy."
    )
    assert "marker123456" not in answered["from the environment"].err


def test_mistakes_are_told_all_at_once(answered: dict[str, Answer]) -> None:
    assert answered["several"].err.splitlines() == [
        "error: seed=x: found str, expected int",
        "error: mode=train: use one of fit, validate, test, predict, plan, dry_run",
        "error: trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?",
        "error: model.wdth: PlainModel takes no wdth. Did you mean width?",
    ]


def test_a_key_that_a_fork_has_removed_is_named(tmp_path: Path) -> None:
    """Also those that are null, which no command line can remove."""
    shutil.copytree(CHECKOUT / "conf", tmp_path / "conf")
    text = (tmp_path / "conf/config.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("init_from", "ckpt_path", "micro_batch_size"))]
    (tmp_path / "conf/config.yaml").write_text("\n".join(lines))
    answer = answers({"removed": ["-cp", str(tmp_path / "conf"), *PLAIN]}, tmp_path)["removed"]
    told = "the config has no such key, and the engine reads it; add it to config.yaml"
    assert answer.err.splitlines() == [
        f"error: {key}: {told}" for key in ("init_from", "ckpt_path", "micro_batch_size")
    ]


def test_help_shows_commands_and_choices_and_imports_no_torch(answered: dict[str, Answer]) -> None:
    answer = answered["--help"]
    assert (answer.returncode, answer.err, answer.imported, answer.left) == (0, "", [], [])
    assert "python train.py strategy=ddp trainer.devices=2" in answer.out
    assert " ".join(answer.out.split()).count(STRATEGIES.replace(",", "")) == 1


def test_what_is_named_in_place_of_lightnings_strategies_is_there() -> None:
    named = {name for told in hydra_errors._STRATEGIES.values() for name in re.findall(r"strategy=(\w+)", told)}
    assert named <= set(STRATEGIES.split(", "))


def test_a_config_can_be_shown_without_a_run(answered: dict[str, Answer]) -> None:
    answer = answered["--cfg"]
    assert (answer.returncode, answer.err, answer.imported, answer.left) == (0, "", [], [])
    assert "_target_: lightswitch.strategies.ddp.DDP" in answer.out


def test_a_mistake_costs_less_than_a_second_of_cpu(tmp_path) -> None:
    def seconds(mistake: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, TRAIN, mistake],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{CHECKOUT / 'src'}:{CHECKOUT}"},
            stderr=-3,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 2
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    for mistake in ("strategy=fdsp", "trainer.max_stps=1"):
        assert min(seconds(mistake) for _ in range(3)) < 1


def test_help_that_is_read_in_part_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as unread:
        shown = subprocess.run(
            [sys.executable, "train.py", "--help"], stdout=unread, stderr=subprocess.PIPE, cwd=CHECKOUT
        )
    assert (shown.returncode, shown.stderr) == (0, b"")
