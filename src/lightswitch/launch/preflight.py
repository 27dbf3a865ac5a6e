"""Every problem of a run that can be known before a process is started, all at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightswitch.batches.plan import BatchError, BatchPlan, scaled_learning_rate
from lightswitch.launch import placement
from lightswitch.launch.mistakes import Mistakes, nearest
from lightswitch.launch.signatures import Parameter, Signature, signature

MODES = ("fit", "validate", "test", "predict")
_HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
_KNOBS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "run_id": (str, int),
    "seed": (int,),
    "mode": (str,),
    "resume": (str,),
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
    _raise(_misspelt_knobs(plain, typed), _wrong_knobs(plain), _nodes(plain, typed_nodes))
    _raise(
        _nodes(plain, plain.keys() - typed_nodes),
        _batch(plain),
        _processes(plain["trainer"], sweep=hydra.mode == RunMode.MULTIRUN),
        _checkpoints(plain),
        _run_directory(Path(hydra.runtime.output_dir)),
        _files(plain),
        _devices_present(plain["trainer"]),
    )
    return _plan(plain)


def _raise(*checks: Iterator[str]) -> None:
    problems = [problem for check in checks for problem in check]
    if problems:
        raise Mistakes(problems)


def _resolved(cfg: DictConfig) -> Any:
    try:
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise Mistakes([f"{key}: {str(error).splitlines()[0]}"]) from error


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
            yield f"{knob}={cfg[knob]}: found {type(cfg[knob]).__name__}, expected {_names(kinds)}"
    if cfg["mode"] not in MODES:
        yield f"mode={cfg['mode']}: use one of {', '.join(MODES)}"
    rule = cfg["lr_scaling"]["rule"]
    try:
        scaled_learning_rate(1.0, rule, 1, cfg["lr_scaling"]["reference_batch_size"])
    except (ValueError, TypeError) as error:
        yield str(error)


def _nodes(cfg: dict[str, Any], keys: Set[str]) -> Iterator[str]:
    """Of the nodes that name code, the arguments that the code does not take."""
    for key in (key for key in cfg if key in keys):
        yield from _node_problems(key, cfg[key])
        if key in ("callbacks", "logger"):
            yield from _unfinished_nodes(key, cfg[key] or {})


def _unfinished_nodes(group: str, nodes: dict[str, Any]) -> Iterator[str]:
    whole = [name for name, node in nodes.items() if node is None or "_target_" in node]
    for name in nodes.keys() - set(whole):
        yield f"{group}.{name} is not switched on.{nearest(name, whole)} To switch it on: {group}=[default,{name}]"


def _node_problems(path: str, node: Any) -> Iterator[str]:
    """Problems of a node that names code, and of the nodes in it."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _node_problems(f"{path}.{index}", item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield from _node_problems(f"{path}.{key}", value)
    if isinstance(node.get("_target_"), str):
        yield from _against_signature(path, node)


def _against_signature(path: str, node: dict[str, Any]) -> Iterator[str]:
    try:
        accepted = signature(node["_target_"])
    except LookupError as error:
        yield f"{path}._target_={node['_target_']}: {error.args[0]}"
        return
    if accepted is None:
        return
    for key, value in node.items():
        if key in _HYDRA_KEYS:
            continue
        if key not in accepted.parameters:
            yield from _unknown(path, key, accepted, node["_target_"])
        elif not _fits(value, accepted.parameters[key]):
            yield f"{path}.{key}={value}: found {type(value).__name__}, expected {_expected(accepted.parameters[key])}"


def _unknown(path: str, key: str, accepted: Signature, target: str) -> Iterator[str]:
    if not accepted.open_ended:
        yield f"{path}.{key}: {target.rpartition('.')[2]} takes no {key}.{nearest(key, accepted.parameters)}"


def _fits(value: Any, parameter: Parameter) -> bool:
    if isinstance(value, dict) or parameter.kinds is None or parameter.literals is None:
        return True
    number = float in parameter.kinds and type(value) is int
    return number or type(value) in parameter.kinds or value in tuple(parameter.literals)  # a list has no hash


def _expected(parameter: Parameter) -> str:
    literals = sorted(str(literal) for literal in parameter.literals or ())
    return ", ".join([*literals, _names(tuple(parameter.kinds or ()))]).strip(", ")


def _names(kinds: tuple[type, ...]) -> str:
    return " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in kinds))


# What was asked for


def _batch(cfg: dict[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    if "accumulate_grad_batches" in trainer:
        yield "trainer.accumulate_grad_batches follows from the batch: set micro_batch_size, and leave it out"
    try:
        _plan(cfg)
    except BatchError as error:
        yield str(error)


def _plan(cfg: dict[str, Any]) -> BatchPlan:
    world = cfg["trainer"]["num_nodes"] * _devices(cfg["trainer"]["devices"])
    return BatchPlan.derive(cfg["global_batch_size"], cfg["micro_batch_size"], world)


def _devices(devices: int | str | list[int]) -> int:
    """The number of devices a node that `Trainer(devices=)` means."""
    if isinstance(devices, list):
        return len(devices)
    if devices in ("auto", -1, "-1"):
        from lightning.pytorch.accelerators import CUDAAccelerator

        return max(1, CUDAAccelerator.auto_device_count())
    return len(devices.split(",")) if isinstance(devices, str) and "," in devices else int(devices)


def _processes(trainer: dict[str, Any], sweep: bool) -> Iterator[str]:
    strategy = trainer.get("strategy") or {}
    method = strategy.get("start_method") if isinstance(strategy, dict) else str(strategy)
    nodes, devices = trainer["num_nodes"], trainer["devices"]
    if nodes > 1 and method in ("spawn", "fork", "ddp_spawn", "ddp_fork"):
        yield f"strategy ddp_{method} starts processes on one node, and trainer.num_nodes={nodes}; use strategy=ddp"
    if str(strategy.get("_target_") if isinstance(strategy, dict) else "").endswith("single.Single"):
        if nodes * _devices(devices) > 1:
            yield f"strategy=single is one device, and {nodes} × {devices} are asked for; use strategy=ddp"
    elif sweep and _devices(devices) > 1 and not method:
        yield "a sweep starts its jobs in one process; with trainer.devices > 1 use strategy=ddp_spawn"
    place = placement.detect()
    if place.is_external and (place.nodes, place.devices_per_node) != (nodes, _devices(devices)):
        yield (
            f"{place.launcher} started {place.nodes} nodes × {place.devices_per_node} processes, and the trainer has "
            f"num_nodes={nodes}, devices={devices}; leave both out, they follow the launcher"
        )


def _checkpoints(cfg: dict[str, Any]) -> Iterator[str]:
    targets = [str((node or {}).get("_target_")) for node in (cfg["callbacks"] or {}).values()]
    if cfg["trainer"].get("enable_checkpointing", True) and not any("Checkpoint" in target for target in targets):
        yield (
            "every checkpoint callback was removed, and Lightning would add one of its own; "
            "also set trainer.enable_checkpointing=false to train without checkpoints"
        )
    if cfg["mode"] != "fit" and not cfg["ckpt_path"]:
        yield f"mode={cfg['mode']} needs ckpt_path=PATH of a checkpoint"


def _run_directory(run_dir: Path) -> Iterator[str]:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield f"the run directory {run_dir} can't be written: no permission in {existing}"


def _files(cfg: dict[str, Any]) -> Iterator[str]:
    named = {
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
    if name == "auto" and CUDAAccelerator.is_available():
        name = "gpu"
    if name not in ("gpu", "cuda", "mps"):
        return
    present = kinds[name].auto_device_count() if kinds[name].is_available() else 0
    if not present:
        yield f"trainer.accelerator={name}: this machine has none; use trainer.accelerator=cpu"
    elif _devices(count) > present:
        yield f"trainer.devices={count}: this machine has {present} of {name}; use trainer.devices={present}"
