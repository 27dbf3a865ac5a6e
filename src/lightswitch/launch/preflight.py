"""Every problem of a run that can be known before a process is started, all at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightswitch.batches.plan import BatchError, BatchPlan, scaled_learning_rate
from lightswitch.launch import nodes, placement, precision
from lightswitch.launch.mistakes import Mistakes, nearest
from lightswitch.strategies import limits

MODES = ("fit", "validate", "test", "predict")
_AS_MANY_AS_THERE_ARE = ("auto", -1, "-1")
_FOLLOWS = {  # arguments of the Trainer that are not given to it by themselves
    "accumulate_grad_batches": "the batch: set micro_batch_size",
    "callbacks": "the group callbacks: type callbacks=[default,early_stopping] or ~callbacks.throughput",
    "logger": "the group logger: type logger=[default,mlflow] or ~logger.tensorboard",
    "plugins": "the group cluster: type cluster=torchrun or another of it",
}
_KNOBS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "run_id": (str, int),
    "seed": (int,),
    "mode": (str,),
    "resume": (str,),
    "init_from": (str, type(None)),
    "ckpt_path": (str, type(None)),
    "global_batch_size": (int,),
    "micro_batch_size": (int, type(None)),
}


def check(cfg: DictConfig) -> BatchPlan:
    """How the run's batch is cut, once nothing is wrong with its config.

    Raises:
        Mistakes: with all problems found. Those in what was typed come first and alone, and before torch is imported,
            as the others may follow from them.
    """
    hydra = HydraConfig.get()
    plain: Any = _resolved(cfg)
    typed = list(hydra.overrides.task)
    typed_nodes = {override.lstrip("+~").partition("=")[0].partition(".")[0] for override in typed}
    _raise(_misspelt_knobs(plain, typed), _wrong_knobs(plain), nodes.problems(plain, typed_nodes))
    _raise(_wrong_counts(plain["trainer"]))
    _raise(
        nodes.problems(plain, plain.keys() - typed_nodes),
        _batch(plain),
        _scaled_rate(cfg, plain),
        _strategy(plain),
        _processes(plain["trainer"], sweep=hydra.mode == RunMode.MULTIRUN),
        _cluster(plain),
        _checkpoints(plain),
        _loggers(plain),
        _run_directory(Path(hydra.runtime.output_dir)),
        _files(plain),
        _devices_present(plain["trainer"]),
        precision.problems(plain, _accelerator(plain["trainer"])),
    )
    return _plan(plain)


def _raise(*checks: Iterator[str]) -> None:
    problems = [problem for check in checks for problem in check]
    if problems:
        raise Mistakes(problems)


def _resolved(cfg: DictConfig) -> Any:
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise Mistakes([f"{error.full_key}: there is no default; type {error.full_key}=VALUE"]) from error
    except InterpolationKeyError as error:
        found = str(error).splitlines()[0]
        raise Mistakes([f"{error.full_key}: {found}; type {error.full_key}=VALUE, or make another choice"]) from error
    except OmegaConfBaseException as error:
        raise Mistakes([f"{error.full_key}: {str(error).splitlines()[0]}"]) from error


# What was typed


def _misspelt_knobs(cfg: dict[str, Any], overrides: list[str]) -> Iterator[str]:
    """A `+key=` that resembles a key there is; any other is a variable of the user's own."""
    for override in overrides:
        key = override.lstrip("+").partition("=")[0]
        if override.startswith("+") and "." not in key and "@" not in key and "/" not in key:
            hint = nearest(key, [known for known in cfg if known != key])
            if hint:
                yield f"{key}: there is no such key.{hint}"


def _wrong_knobs(cfg: dict[str, Any]) -> Iterator[str]:
    for knob, kinds in _KNOBS.items():
        if type(cfg[knob]) not in kinds:
            yield f"{knob}={cfg[knob]}: found {type(cfg[knob]).__name__}, expected {nodes.names(kinds)}"
    if cfg["mode"] not in MODES:
        yield f"mode={cfg['mode']}: use one of {', '.join(MODES)}"
    if type(cfg["seed"]) is int and not 0 <= cfg["seed"] < 2**32:
        yield f"seed={cfg['seed']}: use one from 0 to {2**32 - 1}, as NumPy needs it"
    yield from _wrong_scaling(**cfg["lr_scaling"])


def _wrong_scaling(rule: str, reference_batch_size: int) -> Iterator[str]:
    if type(reference_batch_size) is not int or reference_batch_size < 1:
        yield f"lr_scaling.reference_batch_size={reference_batch_size}: it counts samples, so it is at least 1"
        return
    try:
        scaled_learning_rate(1.0, rule, 1, reference_batch_size)
    except ValueError as error:
        yield str(error)


def _wrong_counts(trainer: dict[str, Any]) -> Iterator[str]:
    nodes, devices = trainer["num_nodes"], trainer["devices"]
    if type(nodes) is not int or nodes < 1:
        yield f"trainer.num_nodes={nodes}: use a number from 1"
    try:
        wrong = devices not in _AS_MANY_AS_THERE_ARE and _devices(devices) < 1
    except ValueError:
        wrong = True
    if wrong:
        yield f"trainer.devices={devices}: use a number from 1, a list of GPUs such as [0,1], -1 or auto"


# What was asked for


def _batch(cfg: dict[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    for argument, source in _FOLLOWS.items():
        if argument in trainer:
            yield f"trainer.{argument} follows from {source}, and leave it out"
    try:
        _plan(cfg)
    except BatchError as error:
        yield str(error)


def _scaled_rate(cfg: DictConfig, plain: dict[str, Any]) -> Iterator[str]:
    rule = plain["lr_scaling"]["rule"]
    if rule == "none":
        return
    if not isinstance((plain.get("optimizer") or {}).get("lr"), int | float):
        yield f"lr_scaling.rule={rule} scales optimizer.lr, and there is none; give optimizer.lr=VALUE"
        return
    other = cfg.copy()
    other.optimizer.lr = 2.0 * cfg.optimizer.lr
    if OmegaConf.to_container(other.model, resolve=True) == plain["model"]:
        yield (
            f"lr_scaling.rule={rule} scales optimizer.lr, which nothing in model refers to; "
            "give the model its rate by 'model.lr=${optimizer.lr}', or the name it has there, or leave lr_scaling out"
        )


def _plan(cfg: dict[str, Any]) -> BatchPlan:
    world = cfg["trainer"]["num_nodes"] * _devices(cfg["trainer"]["devices"])
    strategy = cfg["trainer"].get("strategy")
    together = strategy.get("tensor_parallel_size", 1) if isinstance(strategy, dict) else 1  # on the same samples
    replicas = max(1, world // max(1, together))
    return BatchPlan.derive(cfg["global_batch_size"], cfg["micro_batch_size"], replicas)


def _devices(devices: int | str | list[int]) -> int:
    """The number of devices a node that `Trainer(devices=)` means."""
    if isinstance(devices, list):
        return len(devices)
    if devices in _AS_MANY_AS_THERE_ARE:
        from lightning.pytorch.accelerators import CUDAAccelerator

        return max(1, CUDAAccelerator.auto_device_count())
    if isinstance(devices, str) and "," in devices:  # "2," is the one GPU with the index 2
        return len([index for index in devices.split(",") if index.strip()])
    return int(devices)


def _strategy(cfg: dict[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    strategy = trainer.get("strategy")
    if not isinstance(strategy, dict):
        strategy = {"_target_": str(strategy)}
    devices = _devices(trainer["devices"])
    batch = (cfg["global_batch_size"], cfg["micro_batch_size"])
    on_gpu = _accelerator(trainer) != "cpu"
    yield from limits.problems(
        limits.Request(strategy, cfg["model"], trainer, trainer["num_nodes"], devices, on_gpu, batch)
    )


def _processes(trainer: dict[str, Any], sweep: bool) -> Iterator[str]:
    strategy = trainer.get("strategy") or {}
    method = strategy.get("start_method") if isinstance(strategy, dict) else str(strategy)
    nodes, devices = trainer["num_nodes"], _devices(trainer["devices"])
    if sweep and devices > 1 and not method:
        yield "a sweep starts its jobs in one process; with trainer.devices > 1 use strategy=ddp_spawn"
    place = placement.detect()
    if place.uneven:
        yield (
            f"{place.launcher} started {place.uneven} processes on {place.nodes} nodes, and each must have as many as "
            f"the others; use --ntasks-per-node={place.devices_per_node}"
        )
    elif place.is_external and (place.nodes, place.devices_per_node) != (nodes, devices):
        yield (
            f"{place.launcher} started {_counted(place.nodes, 'node')} × "
            f"{_counted(place.devices_per_node, 'process')}, and the trainer has "
            f"num_nodes={nodes}, devices={devices}; leave both out, they follow the launcher"
        )


def _counted(count: int | None, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def _checkpoints(cfg: dict[str, Any]) -> Iterator[str]:
    targets = _targets(cfg.get("callbacks"))
    if cfg["trainer"].get("enable_checkpointing", True) and not any("Checkpoint" in target for target in targets):
        yield (
            "every checkpoint callback was removed, and Lightning would add one of its own; "
            "also set trainer.enable_checkpointing=false to train without checkpoints"
        )
    if cfg["mode"] != "fit" and not cfg["ckpt_path"]:
        yield f"mode={cfg['mode']} needs ckpt_path=PATH of a checkpoint"


def _loggers(cfg: dict[str, Any]) -> Iterator[str]:
    if _targets(cfg.get("logger")):
        return
    for name, node in (cfg.get("callbacks") or {}).items():
        if str((node or {}).get("_target_")).endswith(("LearningRateMonitor", "DeviceStatsMonitor")):
            yield f"callbacks.{name} writes to a logger, and every logger was removed; also type ~callbacks.{name}"


def _targets(nodes: dict[str, Any] | None) -> list[str]:
    return [str(node.get("_target_")) for node in (nodes or {}).values() if node]


def _cluster(cfg: dict[str, Any]) -> Iterator[str]:
    name = str((cfg.get("cluster") or {}).get("_target_")).rpartition(".")[2]
    wanted = {"TorchElasticEnvironment": "torchrun", "SLURMEnvironment": "slurm"}.get(name)
    found = placement.detect().launcher
    if wanted and wanted != found and cfg["trainer"]["num_nodes"] * _devices(cfg["trainer"]["devices"]) > 1:
        starter = {"torchrun": "torchrun --nproc-per-node=N train.py", "slurm": "srun python train.py"}[wanted]
        yield f"cluster={wanted}, and {wanted} did not start this process; start it by {starter}, or leave cluster out"


def _run_directory(run_dir: Path) -> Iterator[str]:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield f"the run directory {run_dir} can't be written: no permission in {existing}"


def _files(cfg: dict[str, Any]) -> Iterator[str]:
    named = {
        "init_from": cfg["init_from"],
        "ckpt_path": cfg["ckpt_path"],
        "resume": cfg["resume"] if cfg["resume"] not in ("auto", "never") else None,
    }
    for key, path in named.items():
        if path and not Path(path).exists():
            yield f"{key}={path}: there is no such file"


def _devices_present(trainer: dict[str, Any]) -> Iterator[str]:
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

    name, count = trainer.get("accelerator", "auto"), trainer["devices"]
    kinds = {"gpu": CUDAAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator, "cpu": CPUAccelerator}
    if name not in (*kinds, "auto", "tpu"):
        yield f"trainer.accelerator={name} is unknown.{nearest(name, kinds)} Choices: auto, {', '.join(kinds)}, tpu"
    name = _accelerator(trainer)
    if name == "cpu":
        yield from _on_cpu(count)
    if name not in ("gpu", "cuda", "mps"):
        return
    present = kinds[name].auto_device_count() if kinds[name].is_available() else 0
    if not present:
        yield f"trainer.accelerator={name}: this machine has none; use trainer.accelerator=cpu"
    elif _devices(count) > present:
        yield f"trainer.devices={count}: this machine has {present} of {name}; use trainer.devices={present}"


def _accelerator(trainer: dict[str, Any]) -> str:
    """The one in use; what `auto` stands for on this machine."""
    from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

    name = str(trainer.get("accelerator", "auto"))
    if name != "auto":
        return name
    return "gpu" if CUDAAccelerator.is_available() else "mps" if MPSAccelerator.is_available() else "cpu"


def _on_cpu(devices: int | str | list[int]) -> Iterator[str]:
    if devices in (-1, "-1") or isinstance(devices, list) or "," in str(devices):
        yield f"trainer.devices={devices} names GPUs, and the run is on the CPU; use a number of processes or auto"
