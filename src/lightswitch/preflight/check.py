"""Check of a run's whole config and environment, which reports all problems together."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from lightswitch.batches.plan import BatchPlan
from lightswitch.config.overrides import AUTO, files_of_group, quoted, typed_keys
from lightswitch.context import RunContext
from lightswitch.errors import BatchError, RefusedRequest
from lightswitch.preflight import devices, root_keys, strategies, targets
from lightswitch.runs.resume import checkpoint

log = logging.getLogger(__name__)

_EXAMPLES = {  # what to type for a mandatory value
    "trainer.strategy.config": "ds_config.json, a file of DeepSpeed's, or choose a stage: strategy=deepspeed_stage_2",
}
_LOG_BYTES = 1 << 20  # what a run writes before its first checkpoint


def check(cfg: DictConfig, run: RunContext) -> BatchPlan:
    """Check a run's config and environment, and return its batch plan.

    Raises:
        RefusedRequest: with all problems found. Those of keys are raised first, before torch is imported, and those of
            arguments alone, because they may cause the others.
    """
    _raise(root_keys.missing(cfg))
    _raise(config_problems(_resolved(cfg), run.hydra))
    plain = _resolved(cfg)  # with the batch size that the data's constructor has, now that it is imported
    _raise(root_keys.unread_problems(cfg, run.hydra))
    place = run.placement
    of_one_process = plain["mode"] in (*strategies.PLANS, strategies.CHECK)
    if of_one_process:
        _raise(strategies.mode_problems(plain, place, files_of_group(run.hydra, "strategy")))
        plain = strategies.on_its_device(plain)
    trainer = plain["trainer"]
    _raise(devices.process_problems(plain, place))
    if (timeout := os.environ.get("NCCL_TIMEOUT")) and run.is_first and "timeout_seconds" not in str(trainer):
        log.info("advice     NCCL_TIMEOUT has no effect; type trainer.strategy.timeout_seconds=%s instead", timeout)
    kind = devices.accelerator(trainer)
    _raise(
        _batch(plain),
        root_keys.unscaled_rate(cfg, plain),
        strategies.problems(_request(plain, kind)),
        strategies.precision_problems(plain, kind),
        _callbacks(plain),
        _run_directory(run.run_dir),
        _start(plain, run.run_dir),
        () if of_one_process else devices.absent(trainer, place),
        () if of_one_process else devices.compiler_problems(plain.get("compile"), kind),
    )
    _raise(() if of_one_process else devices.node_problems(plain, place))
    return _plan(plain)


def config_problems(cfg: dict[str, Any], hydra: HydraConf) -> list[str]:
    """Return the problems of keys, values and arguments, which do not depend on the machine.

    The checks run in groups: keys and values; arguments of nodes that were typed, whose code is imported;
    arguments of other nodes, whose values may follow typed ones; device counts. A group runs only if those before it
    find nothing.

    Args:
        cfg: resolved config.
        hydra: Hydra's node of the config, with the overrides as typed.
    """
    choices = {group: files_of_group(hydra, group) for group in ("callbacks", "logger")}
    typed_nodes = {key.lstrip("~").partition(".")[0] for key in typed_keys(hydra)}
    of_tools = set() if cfg["mode"] in strategies.PLANS else {"plan"}  # a run imports none
    return (
        [
            *root_keys.wrong(cfg),
            *targets.unnamed(cfg, choices),
            *strategies.trainer_problems(cfg["trainer"], typed_keys(hydra)),
        ]
        or [*targets.problems(cfg, typed_nodes)]
        or [*targets.problems(cfg, cfg.keys() - typed_nodes - of_tools)]
        or [*devices.wrong_counts(cfg["trainer"])]
    )


def _raise(*checks: Iterable[str]) -> None:
    problems = [problem for check in checks for problem in check]
    if problems:
        raise RefusedRequest(problems)


def _resolved(cfg: DictConfig) -> Any:
    _raise(_missing(OmegaConf.to_container(cfg)))  # unresolved, for what refers to them would be named in their place
    try:
        return OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        line, key = str(error).splitlines()[0], error.full_key
        without = "; ~data if the model has its own loaders" if str(key).startswith("data.") else ""
        mend = f"; choose another config, or type {key}=VALUE{without}"
        raise RefusedRequest([f"{key}: {line}{mend * isinstance(error, InterpolationKeyError)}"]) from error


def _missing(node: Any, key: str = "") -> Iterator[str]:
    """Yield a problem for each value that is `???`, OmegaConf's marker for a mandatory value."""
    if node == "???":
        yield f"{key}: there is no default; type {key}={_EXAMPLES.get(key, 'VALUE')}"
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _missing(value, f"{key}.{name}".lstrip("."))


def _batch(cfg: dict[str, Any]) -> Iterator[str]:
    if (splits := (cfg.get("data") or {}).get("sharded_by")) not in (None, "dataset"):
        yield f"data.sharded_by={splits}: expected dataset, if the dataset splits itself by rank, or null"
    try:
        _plan(cfg)
    except BatchError as error:
        yield str(error)


def _plan(cfg: dict[str, Any]) -> BatchPlan:
    request = _request(cfg, "")
    together = request.strategy.get("tensor_parallel_size", 1)  # ranks on the same data
    return BatchPlan.derive(*request.batch, max(1, request.world_size // max(1, together)))


def _request(cfg: dict[str, Any], accelerator: str) -> strategies.Request:
    trainer, strategy = cfg["trainer"], cfg["trainer"].get("strategy")
    return strategies.Request(
        strategy if isinstance(strategy, dict) else {"_target_": str(strategy)},
        cfg["model"],
        trainer,
        trainer["num_nodes"],
        devices.count(trainer),
        accelerator,
        (cfg["global_batch_size"], None if (size := cfg["micro_batch_size"]) == AUTO else size),
    )


def _callbacks(cfg: dict[str, Any]) -> Iterator[str]:
    nodes = {key: str(node.get("_target_")) for key, node in (cfg.get("callbacks") or {}).items() if node}
    if cfg["trainer"].get("enable_checkpointing", True) and not any("Checkpoint" in one for one in nodes.values()):
        yield (
            "no callback writes checkpoints, and Lightning would add its own; type callbacks=[default,NAME] to add to "
            "the default ones, or trainer.enable_checkpointing=false to train without"
        )
    for name in nodes:
        for key, value in cfg["callbacks"][name].items():
            if key in ("folder", "dirpath") and "://" in str(value):
                yield f"callbacks.{name}.{key}={value}: checkpoints are written to folders; type one's path"
    for name, target in nodes.items() if not any((cfg.get("logger") or {}).values()) else ():
        if target.endswith(("LearningRateMonitor", "DeviceStatsMonitor")):
            yield f"callbacks.{name} writes to a logger, and every logger was removed; also type ~callbacks.{name}"


def _run_directory(run_dir: Path) -> Iterator[str]:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if (free_bytes := shutil.disk_usage(existing).free) < _LOG_BYTES:
        yield f"the run directory {run_dir} can't be written: the disk is full, {free_bytes / 1e3:.0f} KB are free"


def _start(cfg: dict[str, Any], run_dir: Path) -> Iterator[str]:
    """Yield the reasons why the run can't start from what its config names."""
    mode, ckpt_path, resume = cfg["mode"], cfg["ckpt_path"], cfg["resume"]
    if mode in ("validate", "test", "predict") and not ckpt_path:
        yield f"mode={mode} needs ckpt_path=PATH of a checkpoint"
    if mode == "fit" and ckpt_path and resume != "auto":
        yield f"ckpt_path={ckpt_path} and resume={resume} both name where the run starts; leave one out"
    may_be_new = mode == "fit" and ckpt_path == "last"  # Lightning, too, starts from scratch without one
    named = {
        "init_from": cfg["init_from"],
        "ckpt_path": None if may_be_new else ckpt_path,
        "resume": resume if resume not in ("auto", "never") else None,
    }
    for key, name in named.items():
        if name is None:
            continue
        path = checkpoint(name, run_dir)
        folders = (path, path / "checkpoints")
        within = [one for folder in folders for one in sorted(folder.glob("*.ckpt"), key=_last_first)]
        if "://" in name:
            yield f"{key}={name}: checkpoints are read from folders; copy it to one, and type its path"
        elif not path.exists() and path != Path(name) and not path.parent.exists():
            run_id = path.parent.parent.name
            found = f"{key}={name} refers to run_id={run_id}, which has no such file"
            yield f"{found}; type run_id=RUN_ID of the run that has it, or its path"
        elif not path.exists():
            there = ", ".join(sorted(one.name for one in path.parent.glob("*.ckpt") if one.exists()))
            yield f"{key}={name}: there is no such file{there and f'; that folder has {there}'}"
        elif within:
            typed = f"{key}={quoted(str(within[0]))}"
            yield f"{key}={name}: found a folder with checkpoints, expected a checkpoint; type {typed}"


def _last_first(path: Path) -> tuple[bool, Path]:
    return path.name != "last.ckpt", path
