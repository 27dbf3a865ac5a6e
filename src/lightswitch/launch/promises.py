"""The check of mode=check: whether a module, with its data and config, keeps the promises of docs/promises.md."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
from lightswitch.checking.check import SINGLE, Check, Row, Way, as_data, holds, table
from lightswitch.checking.comparison import EPS_32
from lightswitch.checking.runs import ShortRun, run_script
from lightswitch.config.overrides import AUTO
from lightswitch.context import RunContext
from lightswitch.errors import Ended as RunEnded
from lightswitch.errors import ExitCode, Refused, RefusedRequest, shown
from lightswitch.launch import commands
from lightswitch.planning import candidates

log = logging.getLogger(__name__)

_OF_RUNS = (  # keys that the check sets for each run, and whose overrides it drops
    *("mode", "plan", "dry_run", "check", "device", "run_id", "hydra", "resume", "ckpt_path"),
    *("strategy", "trainer.strategy", "cluster", "num_nodes", "trainer.num_nodes", "trainer.devices"),
    *(f"trainer.{key}" for key in ("accelerator", "log_every_n_steps", "num_sanity_val_steps")),
    *("trainer.limit_test_batches", "trainer.enable_checkpointing", "trainer.fast_dev_run"),
)
_EPS = {"bf16": 2.0**-7, "16": 2.0**-10}  # machine epsilon, by the first letters of a precision's name


def check(cfg: DictConfig, run: RunContext) -> None:
    """Train a few steps in one process and under each strategy, log a table of the promises, and write check.json.

    Raises:
        Ended: with exit code 1, if a promise does not hold, or the module fails in one process.
        Refused: the run in one process is refused, or takes too few steps.
    """
    with tempfile.TemporaryDirectory(dir=run.run_dir, prefix="check_", ignore_cleanup_errors=True) as folder:
        rows = _check(cfg, run, Path(folder))
    path = run.run_dir / "check.json"
    counts = {"steps": cfg.check.steps, "devices": cfg.check.devices}
    regular_files.write_json(path, {**counts, **as_data(rows)})
    log.info("\n%s\n", table(rows))
    for line in (line for way, row in rows.items() for line in row.lines(way)):
        log.info("%s", line)
    if holds(rows):
        log.info("holds      %d steps, %d devices: no promise is broken", *counts.values())
    log.info("check      %s", shown(path))
    if not holds(rows):
        raise RunEnded(ExitCode.FAILED)


def _check(cfg: DictConfig, run: RunContext, folder: Path) -> dict[str, Row]:
    import torch

    devices = cfg.check.devices
    on_gpus = torch.cuda.device_count() >= devices
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // devices)), "WANDB_MODE": "offline"}
    settings = {
        **_checkpoints(cfg),
        **({"micro_batch_size": "null"} if cfg.micro_batch_size == AUTO else {}),
        **({} if on_gpus else {"trainer.accelerator": "cpu"}),
    }
    micro_batch = cfg.micro_batch_size if isinstance(cfg.micro_batch_size, int) else None
    check = Check(
        partial(run_script, environment=environment),
        folder,
        [*commands.overrides(_OF_RUNS), *(f"{key}={value}" for key, value in settings.items())],
        cfg.check.steps,
        lambda count: BatchPlan.derive(cfg.global_batch_size, micro_batch, count).micro_batch,
        _eps(str(cfg.trainer.get("precision") or "32")),
        is_exact=not on_gpus,
    )
    one = check.run(SINGLE)
    if one.code or one.steps < cfg.check.steps:
        _refuse(cfg, one)
    return {way.name: check.row(way) for way in (SINGLE, *_ways(cfg, run))}


def _eps(precision: str) -> float:
    return next((eps for begin, eps in _EPS.items() if precision.startswith(begin)), EPS_32)


def _checkpoints(cfg: DictConfig) -> dict[str, object]:
    """Return the overrides that make a run save a checkpoint after half of its steps.

    They configure the config's `LastCheckpoints` callback, or add one.
    """
    every = max(1, cfg.check.steps // 2)
    for name, node in (cfg.get("callbacks") or {}).items():
        if str((node or {}).get("_target_")).endswith(".LastCheckpoints"):
            return {f"callbacks.{name}.every_n_steps": every}
    return {
        "callbacks.check_saves._target_": "lightswitch.checkpoints.last.LastCheckpoints",
        "callbacks.check_saves.folder": "'${hydra:runtime.output_dir}/checkpoints'",
        "callbacks.check_saves.every_n_steps": every,
    }


def _ways(cfg: DictConfig, run: RunContext) -> Iterator[Way]:
    """Yield the strategies to check in addition to the single process."""
    asked, chosen = cfg.check.strategies, str(run.hydra.runtime.choices.get("strategy"))
    found = candidates.every(run.hydra, nodes=2, with_zero=True)  # of several nodes: fsdp_hybrid is among them
    if asked is None and chosen in [one.name for one in found]:
        details = [word for word in commands.overrides(()) if word.lstrip("+~").startswith("trainer.strategy.")]
        yield Way(chosen, (f"strategy={chosen}", *details), cfg.check.devices)
        return
    if asked in (None, "all"):
        named = [one.name for one in found if asked == "all" or not (one.is_zero or one.offloads)]
    else:
        named = [asked] if isinstance(asked, str) else asked
    for name in (name for name in map(str, named) if name != SINGLE.name):
        yield Way(name, (f"strategy={name}",), cfg.check.devices)


def _refuse(cfg: DictConfig, one: ShortRun) -> NoReturn:
    """Report that the module does not train in one process, where no strategy can be the cause.

    Raises:
        Ended: with exit code 1, if the run has failed.
        Refused: the run is refused, or takes too few steps.
    """
    name = str(cfg.model.get("_target_"))
    if one.is_refused:
        raise RefusedRequest([one.problem])
    if one.code == 0:
        raise Refused(
            f"{name} took {one.steps} steps in one process, and check.steps={cfg.check.steps}; type a smaller "
            "check.steps, or give it longer data or a larger trainer.max_steps or trainer.max_epochs"
        )
    print(one.output, file=sys.stderr)
    log.error("%s fails in one process, before any strategy is tried: %s", name, one.problem)
    raise RunEnded(ExitCode.FAILED)
