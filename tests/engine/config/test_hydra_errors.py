"""RefusedRequest in what was typed: one line each, exit code 2, before torch is imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from lightswitch.config import aliases, hydra_errors
from lightswitch.config.hydra_versions import VERSION
from lightswitch.preflight import targets
from tests.engine.config.habits import GUIDES, GUIDES_ALONE, GUIDES_CHOICES
from tests.engine.config.mistaken import Answer, answers, joined
from tests.engine.conftest import CHECKOUT, PLAIN

IS_HYDRA_1_3 = bool(VERSION)
STRATEGIES = ", ".join(sorted(path.stem for path in (CHECKOUT / "conf" / "strategy").glob("*.yaml")))
READ = ("seed", "mode", "objective", "resume", "meet_timeout_seconds", "global_batch_size", "lr_scaling", "watch")
READ = (*READ, "lr_scaling.rule", "watch.lost_after_seconds", "trainer.devices", "trainer.num_nodes")
MISTAKES = {
    "strategy=fdsp": f"strategy=fdsp: there is no such strategy. Did you mean fsdp? Choices: {STRATEGIES}",
    "callbacks=[default,early_stoping]": "callbacks=early_stoping: there is no such callbacks. "
    "Did you mean early_stopping? Choices: checkpoint, default, device_monitor, early_stopping, float8, grad_norm, "
    "lr_monitor, model_summary, progress, step_times, throughput, trainable_only",
    "callbacks=[default,lr_finder]": "callbacks=lr_finder: there is no such callbacks; type -m "
    "optimizer.lr=1e-4,1e-3,1e-2 trainer.max_steps=100 compare=true, which compares short runs",
    "debug=one_bach": "debug=one_bach: there is no such debug. Did you mean one_batch? "
    "Choices: anomaly, limit, one_batch, overfit, profiler",
    "trainer.strategy=fdsp": f"strategy=fdsp: there is no such strategy. Did you mean fsdp? Choices: {STRATEGIES}",
    **{
        f"{word}=3": f"{word}: there is no such key.{hint}"
        for word, hint in {
            "lr": " Type model.lr=3",
            "learning_rate": " Type model.lr=3",
            "batch_size": " Type global_batch_size=3",
            "stratgy": " Did you mean strategy?",
            "debg": " Did you mean debug?",
        }.items()
    },
    "cluster=slurm": "cluster=slurm, but slurm did not start this process; start it with srun python train.py or leave "
    "cluster out",
    "--strategy=ddp": "unrecognized arguments: --strategy=ddp; type strategy=ddp, and --help lists all settings",
    "seeed=3": "seeed: there is no such key. Did you mean seed?",
    "model._target_=tests.engine.plain.PartialModel model.optimizer.lr=3": "model.optimizer: found lr but no _target_; "
    "type optimizer.lr=VALUE",
    "model._target_=tests.engine.plain.PartialModel model.optimizer=${optimizer} model.lr=3": "model.lr: PartialModel "
    "takes no lr; type optimizer.lr=3",
    "strategy=ddp trainer.strategy.bucket_cap=50": "trainer.strategy.bucket_cap: DDP takes no bucket_cap. "
    "Did you mean bucket_cap_mb?",
    "strategy=fsdp trainer.strategy.sharding_strategy=full_shrd": "trainer.strategy.sharding_strategy=full_shrd: "
    "found str, expected FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP. Did you mean FULL_SHARD?",
    "meet_timeout_seconds=nan": "meet_timeout_seconds=nan: use a number of seconds from 1 to 2000000",
    "meet_timeout_seconds=1e400": "meet_timeout_seconds=inf: use a number of seconds from 1 to 2000000",
    "strategy=ddp trainer.strategy.timeout_seconds=nan": "trainer.strategy.timeout_seconds=nan: use a number of "
    "seconds from 1 to 2000000",
    "trainer.val_check_interval=0": "trainer.val_check_interval=0: use a number from 1; trainer.limit_val_batches=0 "
    "disables validation",
    "trainer.val_check_interval=0.25": "trainer.val_check_interval=0.25 is a part of an epoch; type "
    "trainer.check_val_every_n_epoch=1 as well, or a number of steps",
    "trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch=0: use a number from 1; "
    "trainer.limit_val_batches=0 disables validation",
    f"trainer.gradient_clip_val={'9' * 400}": "trainer.gradient_clip_val: found a number of 400 digits; use one of "
    "at most 9223372036854775807",
    f"seed={'9' * 5000}": f"seed={'9' * 75}…: found a number of more than 4300 digits; type a smaller one",
    f"+data.x={'[' * 500}{']' * 500}": f"data.x={'[' * 73}…: found brackets nested deeper than 32 levels; type a "
    "flatter value",
    **{
        word: f"{word}: found no key; a setting is KEY=VALUE"
        for word in ("=1", ".width=3", "model..width=3", "model.", "seed:3", "$SEED")
    },
    "seed=1,2": "seed=1,2: found several values; type -m for a run of each, or seed=[1,2] for a list",
    "trainer.devices=1,2": "trainer.devices=1,2: found several values; type -m for a run of each, or "
    "trainer.devices=[1,2] for a list",
    "+seed=3": "+seed: the config already has that key; type seed=VALUE",
    **{
        f"+strategy={choice}": "+strategy: the config already has that choice; type strategy=CHOICE"
        for choice in ("auto", "ddp")
    },
    "optimizer@x=sgd": "optimizer@x: there is no such group. Did you mean optimizer?",
    "watch=false": "\nerror: ".join(
        f"watch=False: expected a group of keys; type watch.{key}_after_seconds=VALUE" for key in ("lost", "hung")
    ),
    "--config-name=eval.yaml": "--config-name=eval.yaml: there is no such config; type mode=test ckpt_path=PATH",
    "+=1": "+=1: found no key; a setting is KEY=VALUE",
    "--resolve": "--resolve: found no --cfg, which it requires; type --cfg job --resolve",
    "trainer.num_nodes=0": "trainer.num_nodes=0: use a number from 1",
    "trainer.devices=0": "trainer.devices=0: use a number from 1, a list of GPUs such as [0,1], -1 or auto",
    "trainer.devices=two": "trainer.devices=two: use a number from 1, a list of GPUs such as [0,1], -1 or auto",
    "cluster=manual cluster.node_rank=0": "cluster.main_address: there is no default; type cluster.main_address=VALUE",
    "model.width=${data.width}": "model.width: Interpolation key 'data.width' not found; "
    "choose another config, or type model.width=VALUE",
    "stratgy=ddp": "stratgy: there is no such key. Did you mean strategy?",
    "~stratgy": "~stratgy: there is no such key. Did you mean strategy?",
    "trainer.max_steps": "trainer.max_steps: it has no value; type trainer.max_steps=VALUE",
    "strategy": "strategy: it has no value; type strategy=VALUE",
    "strategy= ddp": "strategy= ddp: a setting has no spaces; type strategy=ddp",
    "model.width=(1]": "model.width=(1]: found an unmatched ]; type the matching bracket",
    "--nosuch": "unrecognized arguments: --nosuch; a setting is KEY=VALUE, and --help lists all settings",
    **{
        f"{flag}=job.pickle": "--experimental-rerun=job.pickle unpickles a file, which may run code; type the command "
        "from run.json"
        for flag in ("--experimental-rerun", "--experimental-r")
    },
    "--resolve=yes": "argument --resolve: ignored explicit argument 'yes'; "
    "a setting is KEY=VALUE, and --help lists all settings",
    "trainer.devices=[0": "trainer.devices=[0: found an unmatched [; type the matching bracket",
    "data.files=[~/a/*.txt,b]": "data.files=[~/a/*.txt,b]: Hydra requires quotes here; type "
    "'data.files=[\"~/a/*.txt\",b]'",
    "resume=runs/gpt/a=b/checkpoints/last.ckpt": "resume=runs/gpt/a=b/checkpoints/last.ckpt: Hydra requires quotes "
    "here; type 'resume=\"runs/gpt/a=b/checkpoints/last.ckpt\"'",
    'ckpt_path=say "q"/last.ckpt': 'ckpt_path=say "q"/last.ckpt: Hydra requires quotes here; type '
    """'ckpt_path="say \\"q\\"/last.ckpt"'""",
    "model.name=it's": "model.name=it's: Hydra requires quotes here; type 'model.name=\"it'\"'\"'s\"'",
    "~callbacks.thruput": "~callbacks.thruput: there is no such key. Did you mean throughput?",
    "~callbcks": "~callbcks: there is no such key. Did you mean callbacks?",
    "~name": "hydra.run.dir: Interpolation key 'name' not found; add that key to the config",
    "~run_id": "hydra.run.dir: Interpolation key 'run_id' not found; add that key to the config",
    "~init_from": "~init_from: it is null already; leave that out"
    if IS_HYDRA_1_3
    else "init_from: the config has no such key, and the engine reads it; add it to config.yaml",
    "lr_scaling.rule=cubic": "lr_scaling.rule is 'cubic'; use one of: none, linear, sqrt",
    "trainer.max_steps=0": "trainer.max_steps=0: use a number from 1, or -1 with trainer.max_epochs=N",
    "trainer.max_steps=-5": "trainer.max_steps=-5: use a number from 1, or -1 with trainer.max_epochs=N",
    "trainer.max_steps=many": "trainer.max_steps=many: found str, expected int",
    "global_batch_size=ten": "global_batch_size=ten: found str, expected int",
    "global_batch_size=64.5": "global_batch_size=64.5: found float, expected int",
    "hydra.run.dir=/proc/run": "the run directory can't be made: [Errno 2] No such file or directory: '/proc/run'; "
    "type hydra.run.dir=FOLDER",
}
# What preflight finds: it tells all at once, where none is hidden by another
AT_ONCE = {
    "trainer.gpus=3": "trainer.gpus: Trainer takes no gpus; type trainer.devices=3",
    "trainer.epochs=3": "trainer.epochs: Trainer takes no epochs; type trainer.max_epochs=3",
    "optimizer.learning_rate=3": "optimizer.learning_rate: AdamW takes no learning_rate; type optimizer.lr=3",
    "optimizer.lr=-1e-3": "optimizer.lr=-0.001: expected a number of at least 0",
    "optimizer.lr=abc": "optimizer.lr=abc: expected a number of at least 0",
    "+seeed=3": "seeed: there is no such key. Did you mean seed?",
    "trainer.max_stps=1": "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?",
    "+trainer.max_stps=1": "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?",
    "model.wdth=3": "model.wdth: PlainModel takes no wdth. Did you mean width?",
    "model.compile=true": "model.compile: PlainModel takes no compile; type compile=true",
    "model.optimizer.lr=3": "model.optimizer: PlainModel takes no optimizer. Its arguments: model.width, model.lr, "
    "model.dropout, model.eps, model.halved",
    "data.sample=3": "data.sample: PlainData takes no sample. Did you mean samples?",
    "callbacks.throughput.every=3": "callbacks.throughput.every: Throughput takes no every.",
    "callbacks.early_stopping.patience=3": "callbacks.early_stopping is not switched on. "
    "To switch it on: callbacks=[default,early_stopping]",
    "callbacks.throughputt.x=3": "callbacks.throughputt names no class. Did you mean throughput? "
    "For your own class: callbacks.throughputt._target_=my.Class",
    "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping": "callbacks.stop.monitor: "
    "EarlyStopping needs it; give callbacks.stop.monitor=VALUE",
    "model._target_=tests.engine.plain.PlainModl": "model._target_=tests.engine.plain.PlainModl: "
    "tests.engine.plain has no PlainModl",
    "model._target_=tests.plan.PlainModel": "model._target_=tests.plan.PlainModel: there is no module tests.plan",
    "trainer.devices=2.5": "trainer.devices=2.5: found float, expected int or list or str",
    "trainer.precision=12": "trainer.precision=12: found int, expected 16, 16-mixed, 16-true, 32, 32-true, 64, "
    "64-true, bf16, bf16-mixed, bf16-true, transformer-engine, transformer-engine-float16, null",
    "model.width=3.5": "model.width=3.5: found float, expected int",
    "seed=abc": "seed=abc: found str, expected int",
    "watch.lost_after_seconds=0.001": "watch.lost_after_seconds=0.001: use a number of seconds from 5 to 2000000",
    "watch.lost_after_seconds=nan": "watch.lost_after_seconds=nan: use a number of seconds from 5 to 2000000",
    "watch.hung_after_seconds=soon": "watch.hung_after_seconds=soon: found str, expected float or int",
    "trainer.num_nodes=abc": "trainer.num_nodes=abc: found str, expected int",
    "trainer.num_nodes='2'": "trainer.num_nodes=2: found str, expected int",
    "trainer.num_nodes=null": "trainer.num_nodes=null: found null, expected int",
    "data.shards=3": "data.shards: PlainData takes no shards. Its arguments: data.samples, data.batch_size, "
    "data.workers, data.drop_last, data.noise",
    "callbacks.x=1": "callbacks.x names no class. For your own class: callbacks.x._target_=my.Class",
    "seed=-1": "seed=-1: use a number from 0 to 4294967295, as NumPy requires",
    "mode=train": "mode=train: use one of fit, validate, test, predict, plan, dry_run, check",
    "lr_scaling.reference_batch_size=0": "lr_scaling.reference_batch_size=0: expected a number of samples, at least 1",
    "+stratgy=ddp": "stratgy: there is no such key. Did you mean strategy?",
    "+watch.lost_after=3": "watch.lost_after: there is no such key. Did you mean lost_after_seconds?",
    "+lr_scaling.reference=3": "lr_scaling.reference: there is no such key. Did you mean reference_batch_size?",
    "trainer.strategy.prefetch=2": "trainer.strategy.prefetch: auto takes no prefetch; type "
    "strategy=fsdp trainer.strategy.prefetch=2",
    "trainer.deterministic=maybe": "trainer.deterministic=maybe: found str, expected warn, bool or null",
    "trainer.gradient_clip_val=high": "trainer.gradient_clip_val=high: found str, expected float or int or null",
    "trainer.num_nodes=1.5": "trainer.num_nodes=1.5: found float, expected int",
    "optimizer.beta1=0.9": "optimizer.beta1: AdamW takes no beta1. Did you mean betas?",
    "optimizer.weightdecay=0.1": "optimizer.weightdecay: AdamW takes no weightdecay. Did you mean weight_decay?",
    "scheduler.warmup=3": "scheduler.warmup: WarmupDecay takes no warmup. Did you mean warmup_fraction?",
    "mode=eval": "mode=eval: use one of fit, validate, test, predict, plan, dry_run, check",
    "on_nan=retry": "on_nan=retry: use one of stop, skip, ignore",
    "matmul_precision=tf32": "matmul_precision=tf32: use one of highest, high, medium",
    "watch.hung_after_seconds=-1": "watch.hung_after_seconds=-1: use a number of seconds from 1 to 2000000",
    "seed=1.5": "seed=1.5: found float, expected int",
    "seed=99999999999": "seed=99999999999: use a number from 0 to 4294967295, as NumPy requires",
    "compare=yes": "compare=yes: found str, expected true or false",
    "model._target_=mine": "model._target_=mine: it names no module; expected MODULE.CLASS, as in mine.Module",
    "model._target_=nowhere.Model": "model._target_=nowhere.Model: there is no module nowhere",
    "data.samples=many": "data.samples=many: found str, expected int",
    "++trainer.foo=1": "trainer.foo: Trainer takes no foo.",
    "scheduler._target_=torch.optim.lr_scheduler.StepLR": "scheduler.step_size: StepLR needs it; give "
    "scheduler.step_size=VALUE",
    **{f"~{key}": f"{key}: the config has no such key, and the engine reads it; add it to config.yaml" for key in READ},
}

# What is typed by those who come from elsewhere: a choice that is not there, and the one that was meant
MEANT = {
    "strategy": {"DDP": "ddp", "deepspeed_stage3": "deepspeed_stage_3", "deepspeed_3": "deepspeed"},
    "logger": {"wandbb": "wandb", "tensorbord": "tensorboard"},
    "optimizer": {"AdamW": "adamw", "adamW": "adamw"},
    "scheduler": {"cosin": "cosine"},
    "model": {"gpt3": "gpt", "VIT": "vit"},
    "data": {"mnist": "fashion_mnist"},
    "experiment": {"gpt2": "gpt2_openwebtext"},
    "device": {"a100": "a100_40gb", "h10": "h100"},
}
UNMEANT = ("precision=8", "strategy=colossalai", "optimizer=lion", "cluster=pbs")
UNMEANT = (*UNMEANT, "scheduler=onecycle", "model=resnet", "debug=true", "debug=fast", "experiment=lora")


def _choices(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml")))


NO_CHOICES = {
    f"{group}={word}": f"{group}={word}: there is no such {group}. Did you mean {meant}? Choices: {_choices(group)}"
    for group, words in MEANT.items()
    for word, meant in words.items()
}
NO_CHOICES |= {
    choice: f"{choice}: there is no such {(group := choice.partition('=')[0])}. Choices: {_choices(group)}"
    for choice in UNMEANT
}
NO_KEYS = {
    word: f"{word}: there is no such key. Did you mean {key}?"
    for word, key in {
        "micro_batch": "micro_batch_size",
        "lost_after_seconds": "watch.lost_after_seconds",
        "check_val_every_n_epoch": "trainer.check_val_every_n_epoch",
        "ckpt": "ckpt_path",
    }.items()
}
# What is like nothing, and would only mislead: lora is no logger
NO_KEYS |= {word: f"{word}: there is no such key." for word in ("lora", "n_layer")}
NO_KEYS["data.mine"] = "data.mine: there is no such key. In a sweep's params, a new key begins with +: +data.mine"
AT_ONCE |= {
    f"trainer.{word}=3": f"trainer.{word}: Trainer takes no {word}{hint}"
    for word, hint in {
        **{"num_gpus": "; type trainer.devices=3", "nodes": "; type trainer.num_nodes=3"},
        **{"max_epoch": ". Did you mean max_epochs?", "log_every": ". Did you mean log_every_n_steps?"},
        **{"gradient_clip": ". Did you mean gradient_clip_val?", "clip": "; type trainer.gradient_clip_val=3"},
        **{"val_interval": ". Did you mean val_check_interval?"},
        **{"progress_bar_refresh_rate": ". Did you mean enable_progress_bar?"},
    }.items()
}
MISTAKES |= {
    "strategy=deepspeed": "trainer.strategy.config: there is no default; type trainer.strategy.config=ds_config.json, "
    "a file of DeepSpeed's, or choose a stage: strategy=deepspeed_stage_2",
    "strategy=deepspeed_stage_3_offload_nvme": "trainer.strategy.nvme_path: there is no default; type "
    "trainer.strategy.nvme_path=DIR, a folder on a local drive of each node",
    "strategy=fsdp trainer.strategy.cpu_offlod=true": "trainer.strategy.cpu_offlod: FSDP takes no cpu_offlod. "
    "Did you mean cpu_offload?",
    "strategy=fsdp trainer.strategy.cpu_offload=maybe": "trainer.strategy.cpu_offload=maybe: found str, expected bool",
    "strategy=deepspeed_stage_2 trainer.strategy.stag=3": "trainer.strategy.stag: DeepSpeed takes no stag. "
    "Did you mean stage?",
    "strategy=deepspeed_stage_2 trainer.strategy.activation_checkpointing=true": "trainer.strategy."
    "activation_checkpointing: DeepSpeed takes no activation_checkpointing; type strategy=fsdp "
    "trainer.strategy.activation_checkpointing=true",
    "trainer=gpu": "trainer=gpu: there is no such trainer; type trainer.accelerator=gpu",
    "modle.width=3": "modle: there is no such key. Did you mean model?",
    "trainer=ddp": "trainer=ddp: there is no such trainer; type strategy=ddp trainer.devices=N",
    "--trainer.max_steps=10": "unrecognized arguments: --trainer.max_steps=10; type trainer.max_steps=10, and --help "
    "lists all settings",
    "trainer.devices=-2": "trainer.devices=-2: use a number from 1, a list of GPUs such as [0,1], -1 or auto",
    "trainer.num_nodes=-1": "trainer.num_nodes=-1: use a number from 1",
    "name=a/b": "name='a/b' is no valid name: letters, digits and . _ - = , are allowed; type name=NAME",
    "run_id=../x": "run_id='../x' is no valid name: letters, digits and . _ - = , are allowed; type run_id=NAME",
    "name=???": "name: there is no default; type name=VALUE",
    "run_id=???": "run_id: there is no default; type run_id=VALUE",
    "run_id=": "run_id is empty; type run_id=NAME",
    "mode=plan plan.memory_gib=big": "plan.memory_gib=big: use a number greater than 0",
    "mode=dry_run dry_run.rank=99": "dry_run.rank=99: the world has one rank, 0",
    "meet_timeout_seconds=soon": "meet_timeout_seconds=soon: found str, expected float or int",
    "num_nodes=3": "num_nodes=3: there is no file of that number; type trainer.num_nodes=3",
    "--node_rank=1": "unrecognized arguments: --node_rank=1; type cluster=manual cluster.node_rank=1, and --help lists "
    "all settings",
    "node_rank=1": "node_rank: there is no such key. Type cluster=manual cluster.node_rank=1",
    "master_addr=10.0.0.1": "master_addr: there is no such key. Type cluster=manual cluster.main_address=10.0.0.1",
    "master_port=12355": "master_port: there is no such key. Type cluster=manual cluster.main_port=12355",
    "cluster=manual": "cluster.node_rank: there is no default; type cluster.node_rank=VALUE\n"
    "error: cluster.main_address: there is no default; type cluster.main_address=VALUE",
}
# What reads a variable of the environment, and what the line says in its place
FROM_ENVIRONMENT = {
    "run_id=${oc.env:PIN}": "error: run_id=${oc.env:PIN} is no valid name",
    "seed=${oc.env:PIN}": "error: seed=${oc.env:PIN}: found str, expected int",
    "-m seed=${oc.env:PIN} model.width=2,3": "error: seed=${oc.env:PIN}: found str, expected int",
    "-m run_id=${oc.env:PIN} seed=1,2": "error: run_id=${oc.env:PIN} is no valid name",
    "hydra.run.dir=/proc/${oc.env:PIN}234": "error: the run directory can't be made: "
    "hydra.run.dir=/proc/${oc.env:PIN}234: No such file or directory; type hydra.run.dir=FOLDER",
}
# What a file of the config may hold that can't be read, and the line
FILES = {
    "bracket": (b"x: 1\nsizes: [1, 2\n", ", line 3, column 1: while parsing a flow sequence, "),
    "colon": (b"_target_: my.Data: 3\n", ", line 1, column 18: mapping values are not allowed "),
    "tab": (
        b"x:\n\ty: 1\n",
        ", line 2, column 1: while scanning for the next token, found character ",
    ),
    "twice": (b"x: 1\nx: 2\n", ", line 2, column 1: while constructing a mapping, found duplicate key x"),
    "zero": (b"x: \0\n", ": found the character #x0000, which YAML does not allow"),
    "latin": ("name: Größe\n".encode("latin-1"), ": found the byte 0xf6; save the file in UTF-8"),
}
WITH_SPACES = {"trainer.max_steps = 10": "trainer.max_steps = 10: a setting has no spaces; type trainer.max_steps=10"}
MISTAKES |= WITH_SPACES
TOGETHER = [*joined([one] for one in AT_ONCE if one[0] != "~"), *joined([one] for one in AT_ONCE if one[0] == "~")]


pytestmark = pytest.mark.timeout(3600)  # the first waits for all answers, 25 s of CPU


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    commands = {mistake: [*PLAIN, *mistake.split()] for mistake in MISTAKES}
    commands |= {mistake: [*PLAIN, mistake] for mistake in WITH_SPACES}
    commands |= {" ".join(words): [*PLAIN, *words] for words in TOGETHER}
    commands["several"] = [*PLAIN, "trainer.max_stps=1", "seed=x", "mode=train", "model.wdth=3"]
    commands["from the environment"] = ["API_KEY=marker123456", *PLAIN, "strategy=${oc.env:API_KEY}"]
    commands |= {f"from the environment {words}": ["PIN=a/b7c", *PLAIN, *words.split()] for words in FROM_ENVIRONMENT}
    (mine := tmp_path_factory.mktemp("mine") / "data").mkdir()
    for name, (content, _) in FILES.items():
        (mine / f"{name}.yaml").write_bytes(content)
        commands[f"file {name}"] = ["--config-dir", str(mine.parent), PLAIN[0], f"data={name}"]
    (mine / "nothing.yaml").write_text("x: 1\n")
    commands["file nothing"] = ["--config-dir", str(mine.parent), PLAIN[0], "data=nothing"]
    commands["--help"] = ["--help"]
    commands["--cfg"] = ["strategy=ddp", "--cfg", "job"]
    return answers(commands, tmp_path_factory.mktemp("mistaken"))


def test_a_mistake_is_told_in_a_line_before_torch_is_imported(answered: dict[str, Answer]) -> None:
    expected = {typed: Answer(2, "", f"error: {line}\n", imported=[], left=[]) for typed, line in MISTAKES.items()}
    assert {typed: answered[typed] for typed in MISTAKES if answered[typed] != expected[typed]} == {}


def test_a_choice_that_is_not_there_is_told_with_the_one_that_was_meant() -> None:
    """As Hydra raises it, whose own errors MISTAKES has."""
    for typed, line in NO_CHOICES.items():
        group, _, choice = typed.partition("=")
        missing = MissingConfigException("", f"{group}/{choice}", _choices(group).split(", "))
        assert hydra_errors.problems_of_composition(missing) == [line]


def test_a_key_that_is_not_there_is_told_with_the_one_that_was_meant() -> None:
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        cfg = compose("config", [*PLAIN])
    for key, line in NO_KEYS.items():
        with pytest.raises(ConfigAttributeError) as lacks:
            OmegaConf.update(cfg, key, 3)
        error = ConfigCompositionException()
        error.__cause__ = lacks.value
        assert hydra_errors.problems_of_composition(error) == [line]


def test_a_file_of_the_config_that_cannot_be_read_is_named_with_its_line(answered: dict[str, Answer]) -> None:
    for name, (_, line) in FILES.items():
        answer = answered[f"file {name}"]
        assert re.match(rf"error: /\S+/data/{name}\.yaml{re.escape(line)}", answer.err), answer.err
        assert (answer.err.count("\n"), answer.returncode, answer.imported, answer.left) == (1, 2, [], []), name


def test_a_refusal_prints_what_was_typed_and_not_the_variable(answered: dict[str, Answer]) -> None:
    for words, told in FROM_ENVIRONMENT.items():
        refused = answered[f"from the environment {words}"]
        assert (refused.returncode, refused.left) == (2, []), words
        assert told in refused.err
        assert not re.search(r"a/b7c|/proc/a'", refused.err)


def test_a_choice_that_names_no_class_is_told(answered: dict[str, Answer]) -> None:
    told = "error: data: it names no class; type data._target_=my.Class, or choose another config\n"
    assert (answered["file nothing"].err, answered["file nothing"].returncode) == (told, 2)


@pytest.mark.parametrize(("plugin", "extra"), [("sweeper/optuna", "optuna"), ("launcher/submitit_slurm", "submitit")])
def test_a_plugin_that_is_not_installed_is_told_with_its_extra(plugin: str, extra: str) -> None:
    """As Hydra reports it where the package is missing, which here it is not."""
    missing = MissingConfigException("", f"hydra/{plugin}", ["basic"])
    told = f"hydra/{plugin.replace('/', '=')}: its package is not installed; type pip install -e '.[{extra}]'"
    assert hydra_errors.problems_of_composition(missing) == [told]


def test_an_option_is_of_the_strategies_that_are_named() -> None:
    for name, target in targets._STRATEGIES.items():
        assert f"_target_: {target}\n" in (CHECKOUT / "conf" / "strategy" / f"{name}.yaml").read_text()


def test_there_are_as_many_mistakes_as_were_found_to_be_typed() -> None:
    guides = sum(map(len, (*GUIDES.values(), GUIDES_ALONE, GUIDES_CHOICES)))
    assert len(MISTAKES) + len(AT_ONCE) + len(NO_CHOICES) + len(NO_KEYS) + guides >= 250


def test_a_choice_from_the_environment_is_named_without_its_value(answered: dict[str, Answer]) -> None:
    told = "there is no such strategy." if IS_HYDRA_1_3 else "a choice takes no resolver; let the shell insert"
    assert answered["from the environment"].err.startswith(f"error: strategy=${{oc.env:API_KEY}}: {told}")
    assert "marker123456" not in answered["from the environment"].err


def test_mistakes_are_told_all_at_once(answered: dict[str, Answer]) -> None:
    for words in TOGETHER:
        answer = answered[" ".join(words)]
        assert sorted(answer.err.splitlines()) == sorted(f"error: {AT_ONCE[word]}" for word in words)
        assert (answer.returncode, answer.out, answer.imported, answer.left) == (2, "", [], [])
    assert answered["several"].err.splitlines() == [
        "error: seed=x: found str, expected int",
        "error: mode=train: use one of fit, validate, test, predict, plan, dry_run, check",
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


def test_a_word_stands_in_the_table_once() -> None:
    words = [word for words in aliases._WORDS.values() for word in words.split()]
    assert [word for word, times in Counter(words).items() if times > 1] == []


def test_a_config_can_be_shown_without_a_run(answered: dict[str, Answer]) -> None:
    answer = answered["--cfg"]
    assert (answer.returncode, answer.err, answer.imported, answer.left) == (0, "", [], [])
    assert "_target_: lightswitch.strategies.ddp.DDP" in answer.out


def test_help_that_is_read_in_part_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as unread:
        shown = subprocess.run(
            [sys.executable, "train.py", "--help"], stdout=unread, stderr=subprocess.PIPE, cwd=CHECKOUT
        )
    assert (shown.returncode, shown.stderr) == (0, b"")
