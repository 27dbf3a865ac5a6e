"""Check of a run's whole config and environment, which reports all problems together."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from lightswitch.batches.plan import BatchPlan
from lightswitch.cluster import placement
from lightswitch.cluster.placement import Placement
from lightswitch.config import moved
from lightswitch.config.overrides import key_and_value, quoted, typed_keys, typed_overrides
from lightswitch.config.values import AUTO, files_of_group, name_problems
from lightswitch.context import RunContext
from lightswitch.errors import BatchError, RefusedRequest, listed
from lightswitch.preflight import devices, environment, planned, root_keys, strategies, targets, trainer
from lightswitch.runs import saved

log = logging.getLogger(__name__)

_EXAMPLES = {  # what to type for a mandatory value
    "trainer.strategy.config": "ds_config.json, a file of DeepSpeed's, or choose a stage: strategy=deepspeed_stage_2",
    "trainer.strategy.nvme_path": "DIR, a folder on a local drive of each node",
}
_LOG_BYTES = 1 << 20  # what a run writes before its first checkpoint


def check(cfg: DictConfig, run: RunContext) -> BatchPlan:
    """Check a run's config and environment, and return its batch plan.

    Raises:
        RefusedRequest: with all problems found. Those of keys are raised first, before torch is imported, and those of
            arguments alone, because they may cause the others.
    """
    _raise(root_keys.missing(cfg))
    moved.follow(cfg, run)
    plain: Any = _resolved(cfg, run)
    typed = typed_overrides(run.hydra)
    _raise(iter(config_problems(plain, run.hydra)))
    plain = _resolved(cfg, run)  # with the batch size that the data's constructor has, now that it is imported
    _raise(root_keys.unread_problems(cfg, run.hydra))
    if is_planned := plain["mode"] in planned.MODES:
        _raise(planned.problems(plain, run.placement, files_of_group(run.hydra, "precision")))
        plain = planned.on_its_device(plain)
    if is_checked := plain["mode"] == planned.CHECK:
        _raise(planned.checked_problems(plain, run.placement, files_of_group(run.hydra, "strategy")))
    _raise(environment.unfit_packages())
    _raise(environment.of_accelerate(typed_keys(run.hydra), lambda: devices.accelerator(plain["trainer"])))
    if (timeout := os.environ.get("NCCL_TIMEOUT")) and run.is_first and "timeout_seconds" not in str(plain["trainer"]):
        log.info("advice     NCCL_TIMEOUT has no effect; type trainer.strategy.timeout_seconds=%s instead", timeout)
    _raise(devices.other_counts(plain["trainer"], run.placement), devices.absent_processes(plain, run.placement))
    _raise(devices.separate(plain, run.placement), devices.started_twice(plain, run.placement))
    _raise(
        _batch(plain, run.placement),
        root_keys.unscaled_rate(cfg, plain),
        _strategy(plain, run.placement),
        _checkpoints(plain, typed),
        _loggers(plain),
        _run_directory(run.run_dir),
        _files(plain, run.run_dir),
        trainer.precision_problems(plain, devices.accelerator(plain["trainer"])),
        *([] if is_planned or is_checked else _machine(plain, run)),
    )
    if not (is_planned or is_checked):
        _raise(devices.unstarted(plain, run.placement))
        _raise(devices.unfit_for_changes(), _worlds_to_come(plain))
    return _plan(plain, run.placement)


def config_problems(cfg: dict[str, Any], hydra: HydraConf) -> list[str]:
    """Return the problems of keys, values and arguments, which do not depend on the machine.

    The checks run in groups: integers beyond 64 bits; names, keys and values; arguments of nodes that were typed, whose
    code is imported; arguments of other nodes, whose values may follow typed ones; device counts. A group runs only if
    those before it find nothing.

    Args:
        cfg: resolved config.
        hydra: Hydra's node of the config, with the overrides as typed.
    """
    typed, choices = typed_overrides(hydra), {group: files_of_group(hydra, group) for group in ("callbacks", "logger")}
    given = {key: cfg.get(key) for key in ("name", "run_id")}
    typed_keys = {key_and_value(override)[0] for override in typed}
    typed_nodes = {key.lstrip("~").partition(".")[0] for key in typed_keys}
    of_tools = set() if cfg["mode"] in planned.MODES else {"plan"}  # a run imports none
    return (
        [*root_keys.beyond_integers(cfg)]
        or [
            *name_problems(given),
            *root_keys.misspelt(cfg, typed),
            *root_keys.wrong(cfg),
            *targets.unnamed(cfg, choices),
            *trainer.problems(cfg["trainer"], typed_keys),
        ]
        or [*targets.problems(cfg, typed_nodes)]
        or [*targets.problems(cfg, cfg.keys() - typed_nodes - of_tools)]
        or [*devices.wrong_counts(cfg["trainer"])]
    )


def _machine(cfg: dict[str, Any], run: RunContext) -> Iterator[Iterator[str]]:
    """Yield the checks of this machine's devices and compiler."""
    yield devices.absent(cfg["trainer"], run.placement)
    yield devices.compiler_problems(cfg, devices.accelerator(cfg["trainer"]))


def _raise(*checks: Iterator[str]) -> None:
    problems = [problem for check in checks for problem in check]
    if problems:
        raise RefusedRequest(problems)


def _resolved(cfg: DictConfig, run: RunContext) -> Any:
    _raise(_missing(OmegaConf.to_container(cfg)))  # unresolved, for what refers to them would be named in their place
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except InterpolationKeyError as error:
        raise RefusedRequest([_unresolved(error, run)]) from error
    except OmegaConfBaseException as error:
        raise RefusedRequest([f"{error.full_key}: {str(error).splitlines()[0]}"]) from error


def _missing(node: Any, key: str = "") -> Iterator[str]:
    """Yield a problem for each value that is `???`, OmegaConf's marker for a mandatory value."""
    if node == "???":
        yield f"{key}: there is no default; type {key}={_EXAMPLES.get(key, 'VALUE')}"
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _missing(value, f"{key}.{name}".lstrip("."))


def _unresolved(error: InterpolationKeyError, run: RunContext) -> str:
    """Return the message for a value that refers to a missing key: `model=vit` reads data.image_size, which only image
    data have."""
    found = str(error).splitlines()[0]
    wanted = re.search(r"'(\w+)\.(\w+)' not found", found)
    choices = sorted(_choices_with(wanted[1], wanted[2], run)) if wanted else []
    other = f"use {listed(choices, separator=' or ')}" if choices else "choose another config"
    without = "; ~data if the model has its own loaders" if str(error.full_key).startswith("data.") else ""
    return f"{error.full_key}: {found}; {other}, or type {error.full_key}=VALUE{without}"


def _choices_with(group: str, key: str, run: RunContext) -> Iterator[str]:
    """Yield the choices of a group whose file sets a top-level key."""
    for name, file in files_of_group(run.hydra, group).items():
        if re.search(rf"^{key}:", file.read_text(), re.MULTILINE):
            yield f"{group}={name}"


def _batch(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    if (splits := (cfg.get("data") or {}).get("sharded_by")) not in (None, "dataset"):
        yield f"data.sharded_by={splits}: expected dataset, if the dataset splits itself by rank, or null"
    try:
        _plan(cfg, place)
    except BatchError as error:
        yield str(error)


def _plan(cfg: dict[str, Any], place: Placement) -> BatchPlan:
    world = place.uneven or cfg["trainer"]["num_nodes"] * devices.count(cfg["trainer"])
    strategy = cfg["trainer"].get("strategy")
    together = strategy.get("tensor_parallel_size", 1) if isinstance(strategy, dict) else 1  # ranks on the same data
    replicas = max(1, world // max(1, together))
    return BatchPlan.derive(cfg["global_batch_size"], _micro_batch(cfg), replicas)


def _micro_batch(cfg: dict[str, Any]) -> int | None:
    """Return the configured micro-batch size, or None if it is `auto`, still to be found."""
    return None if (size := cfg["micro_batch_size"]) == AUTO else size


def _strategy(cfg: dict[str, Any], place: Placement) -> Iterator[str]:
    trainer, request = cfg["trainer"], _request(cfg, cfg["trainer"]["num_nodes"], place.uneven)
    target = str(request.strategy.get("_target_"))
    if cfg["on_nan"] == "skip" and target.endswith(".DeepSpeed"):
        yield "on_nan=skip: DeepSpeed also steps when there is no gradient; use strategy=fsdp, or on_nan=stop"
    if trainer.get("sync_batchnorm"):
        has_group = request.world_size > 1 or not target.endswith(("Single", "auto"))
        if target.endswith(".DeepSpeed"):
            yield "trainer.sync_batchnorm=true is not supported under DeepSpeed; use strategy=ddp or fsdp"
        elif request.accelerator == "cpu" and has_group:
            yield "trainer.sync_batchnorm=true needs GPUs, because torch's SyncBatchNorm does; leave it out on CPUs"
    yield from strategies.problems(request)


def _request(cfg: dict[str, Any], nodes: int, uneven: int | None = None) -> strategies.Request:
    trainer = cfg["trainer"]
    strategy = trainer.get("strategy")
    if not isinstance(strategy, dict):
        strategy = {"_target_": str(strategy)}
    batch = (cfg["global_batch_size"], _micro_batch(cfg))
    kind = devices.accelerator(trainer)
    return strategies.Request(strategy, cfg["model"], trainer, nodes, devices.count(trainer), kind, batch, uneven)


def _worlds_to_come(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a problem if the strategy refuses a number of nodes that an elastic torchrun may continue with."""
    worlds = placement.elastic_nodes() or range(0)
    refusing = {nodes: list(strategies.problems(_request(cfg, nodes))) for nodes in worlds}
    unfit = [nodes for nodes, problems in refusing.items() if problems]
    if unfit:
        fewest = unfit[-1] + 1
        instead = f"; or type --nnodes={fewest}:{worlds[-1]}" if fewest < worlds[-1] else ""
        yield (
            f"torchrun --nnodes={worlds[0]}:{worlds[-1]} may continue with "
            f"{unfit[0]} node{'s' if unfit[0] > 1 else ''}: {refusing[unfit[0]][0]}{instead}"
        )


def _checkpoints(cfg: dict[str, Any], typed: list[str]) -> Iterator[str]:
    targets = _targets(cfg.get("callbacks"))
    is_missing = cfg["trainer"].get("enable_checkpointing", True) and not any("Checkpoint" in one for one in targets)
    if is_missing and (chosen := _chosen_alone(typed)):
        yield (
            f"callbacks={chosen} leaves out the default callbacks, including those that write checkpoints; type "
            f"callbacks=[default,{chosen}]"
        )
    elif is_missing:
        yield (
            "every checkpoint callback was removed, and Lightning would add its default one; "
            "also set trainer.enable_checkpointing=false to train without checkpoints"
        )
    if cfg["mode"] not in ("fit", planned.CHECK, *planned.MODES) and not cfg["ckpt_path"]:
        yield f"mode={cfg['mode']} needs ckpt_path=PATH of a checkpoint"


def _chosen_alone(typed: list[str]) -> str | None:
    """Return the choice that was typed for callbacks if it leaves out `default`, otherwise None."""
    chosen = [
        value for key, value in map(key_and_value, typed) if key == "callbacks" and re.fullmatch(r"[\w,[\]]+", value)
    ]
    return chosen[-1].strip("[]") if chosen and "default" not in chosen[-1] else None


def _loggers(cfg: dict[str, Any]) -> Iterator[str]:
    if _targets(cfg.get("logger")):
        return
    for name, node in (cfg.get("callbacks") or {}).items():
        if isinstance(node, dict) and str(node.get("_target_")).endswith(("LearningRateMonitor", "DeviceStatsMonitor")):
            yield f"callbacks.{name} writes to a logger, and every logger was removed; also type ~callbacks.{name}"


def _targets(nodes: dict[str, Any] | None) -> list[str]:
    return [str(node.get("_target_")) for node in (nodes or {}).values() if isinstance(node, dict)]


def _run_directory(run_dir: Path) -> Iterator[str]:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        why = f"the file system of {existing} is read-only" if is_read_only else f"no permission in {existing}"
        yield f"the run directory {run_dir} can't be written: {why}"
    elif (free_bytes := shutil.disk_usage(existing).free) < _LOG_BYTES:
        yield f"the run directory {run_dir} can't be written: the disk is full, {free_bytes / 1e3:.0f} KB are free"


def _files(cfg: dict[str, Any], run_dir: Path) -> Iterator[str]:
    if cfg["mode"] == "fit" and cfg["ckpt_path"] and cfg["resume"] != "auto":
        yield f"ckpt_path={cfg['ckpt_path']} and resume={cfg['resume']} both name where the run starts; leave one out"
    may_be_new = cfg["mode"] == "fit" and cfg["ckpt_path"] == "last"  # Lightning, too, starts from scratch without one
    named = {
        "init_from": cfg["init_from"],
        "ckpt_path": None if may_be_new else cfg["ckpt_path"],
        "resume": cfg["resume"] if cfg["resume"] not in ("auto", "never") else None,
    }
    for key, name in named.items():
        if name is None:
            continue
        if not name:
            yield f"{key} is empty; leave it out, or name a checkpoint"
        elif "://" in name:
            yield f"{key}={name}: checkpoints are read from folders; copy it to one, and type its path"
        elif not (path := saved.checkpoint(name, run_dir)).exists():
            yield f"{key}={name}{_what_is_missing(path, Path(name))}{_checkpoints_beside(path)}"
        elif within := next(_checkpoints_within(path), None):
            typed = f"{key}={quoted(str(within))}"
            yield f"{key}={name}: found a folder with checkpoints, expected a checkpoint; type {typed}"


def _what_is_missing(path: Path, typed: Path) -> str:
    if path == typed:
        return ": there is no such file"
    if path.parent.exists():
        return f": there is no {path}"
    run_id = path.parent.parent.name
    return f" refers to run_id={run_id}, which has no such file; type run_id=RUN_ID of the run that has it, or its path"


def _checkpoints_within(path: Path) -> Iterator[Path]:
    """Yield the checkpoints in a folder, or in the `checkpoints` folder of a run, last.ckpt first."""
    for folder in (path, path / "checkpoints"):
        yield from sorted(folder.glob("*.ckpt"), key=lambda other: (other.name != "last.ckpt", other.name))


def _checkpoints_beside(path: Path) -> str:
    there = sorted(other.name for other in path.parent.glob("*.ckpt") if other.exists())
    return f"; that folder has {', '.join(there)}" if there else ""
