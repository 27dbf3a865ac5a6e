"""The check of mode=check: whether a module, with its data and config, keeps the promises of docs/promises.md."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from lightswitch import regular_files
from lightswitch.checking import table
from lightswitch.checking.check import SINGLE, Check
from lightswitch.checking.comparison import EPS_32, states
from lightswitch.checking.runs import Ended, Starter, Way
from lightswitch.config.overrides import AUTO, files_of_group
from lightswitch.context import RunContext
from lightswitch.errors import Ended as RunEnded
from lightswitch.errors import ExitCode, Refused, RefusedRequest, shown
from lightswitch.launch import commands

log = logging.getLogger(__name__)

_OF_RUNS = (  # keys that the check sets for each run, and whose overrides it drops
    *("strategy", "trainer.strategy", "cluster", "resume", "ckpt_path", "compare"),
    *(f"trainer.{key}" for key in ("accelerator", "log_every_n_steps", "num_sanity_val_steps")),
    *("trainer.limit_test_batches", "trainer.enable_checkpointing", "trainer.fast_dev_run"),
)
_MODULES = ("build", "stages", "report", "auto", "hydra_entry")  # modules of lightswitch.launch that each run imports
_EPS = {"bf16": 2.0**-7, "16": 2.0**-10}  # machine epsilon, by the first letters of a precision's name
NEEDS_GPU = re.compile(r"NVIDIA driver|not compiled with CUDA|CUDA (?:device|error|is not|unavailable)|No CUDA|nvcc")


def check(cfg: DictConfig, run: RunContext) -> None:
    """Train a few steps in one process and under each strategy, log a table of the promises, and write check.json.

    Raises:
        Ended: with exit code 1, if a promise does not hold, or the module fails in one process.
        Refused: the run in one process is refused, takes too few steps, or needs a GPU.
    """
    with tempfile.TemporaryDirectory(dir=run.run_dir, prefix="check_", ignore_cleanup_errors=True) as folder:
        found = _check(cfg, run, Path(folder))
    path = run.run_dir / "check.json"
    regular_files.write_text(path, json.dumps(table.check_as_data(found), indent=1) + "\n")
    log.info("\n%s\n", table.as_text(found))
    for line in table.lines(found):
        log.info("%s", line)
    log.info("check      %s", shown(path))
    if table.is_broken(found):
        raise RunEnded(ExitCode.FAILED)


def _check(cfg: DictConfig, run: RunContext, folder: Path) -> table.Found:
    import torch

    devices = cfg.check.devices
    on_gpus = torch.cuda.device_count() >= devices
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // devices)), "WANDB_MODE": "offline"}
    ways = list(_ways(cfg, run))
    starter = Starter(Path(sys.argv[0]).absolute(), _preloaded(cfg, run, ways, on_gpus), environment)
    of_all = {
        **_checkpoints(cfg),
        **({"micro_batch_size": "null"} if cfg.micro_batch_size == AUTO else {}),
        **({} if on_gpus else {"trainer.accelerator": "cpu"}),
    }
    found = Check(
        starter,
        folder,
        [*commands.overrides_of_run(without=_OF_RUNS), *(f"{key}={value}" for key, value in of_all.items())],
        cfg.check.steps,
        devices,
        cfg.global_batch_size,
        cfg.micro_batch_size if isinstance(cfg.micro_batch_size, int) else None,
        _eps(str(cfg.trainer.get("precision") or "32")),
        is_exact=not on_gpus,
    )
    one = found.whole(SINGLE)
    if one.code or max(states(one.moments), default=0) < cfg.check.steps:
        _refuse(cfg, one, on_gpus)
    return found.closely(ways)


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
    nodes = dict(_nodes(run))
    if asked is None and chosen in nodes:
        details = commands.overrides_below("trainer.strategy")
        yield Way(chosen, (f"strategy={chosen}", *details), cfg.check.devices)
        return
    named = list(nodes) if asked == "all" else [asked] if isinstance(asked, str) else asked
    if named is None:
        named = [name for name, node in nodes.items() if not (_is_zero(node) or node.get("cpu_offload"))]
    for name in (name for name in map(str, named) if name != SINGLE.name):
        yield Way(name, (f"strategy={name}",), cfg.check.devices)


def _nodes(run: RunContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config folders' strategies for several devices, without those that only start processes differently."""
    for name, path in files_of_group(run.hydra, "strategy").items():
        node: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        node = node.get("strategy")
        if not isinstance(node, dict) or "???" in node.values() or "start_method" in node:
            continue
        target = str(node.get("_target_"))
        has_code = find_spec("deepspeed" if _is_zero(node) else target.rpartition(".")[0]) is not None
        if has_code and not target.endswith((".Single", ".auto")):
            yield name, node


def _preloaded(cfg: DictConfig, run: RunContext, ways: Sequence[Way], on_gpus: bool) -> list[str]:
    """Return the modules that the fork server imports; on GPUs no user code, as importing it may initialize them."""
    named = {way.name for way in ways}
    nodes = [node for name, node in _nodes(run) if name in named]
    if not on_gpus:
        nodes += [cfg.get("model") or {}, cfg.get("data") or {}]
    targets = [str(node.get("_target_", "")).rpartition(".")[0] for node in nodes]
    return [*(f"lightswitch.launch.{name}" for name in _MODULES), *(name for name in targets if name)]


def _refuse(cfg: DictConfig, one: Ended, on_gpus: bool) -> NoReturn:
    """Report that the module does not train in one process, where no strategy can be the cause.

    Raises:
        Ended: with exit code 1, if the run has failed.
        Refused: the run is refused, takes too few steps, or needs a GPU.
    """
    name = str(cfg.model.get("_target_"))
    if one.is_refused:
        raise RefusedRequest([one.problem])
    if one.code == 0 and (steps := max(states(one.moments), default=0)):
        raise Refused(
            f"{name} ended after {steps} step{'s' if steps > 1 else ''} in one process, and check.steps="
            f"{cfg.check.steps}; type a smaller check.steps, or a larger trainer.max_steps or trainer.max_epochs"
        )
    if one.code == 0:
        raise Refused(f"{name} took no step in one process; give it data of at least one global batch")
    if not on_gpus and NEEDS_GPU.search(one.output):
        raise Refused(
            f"{name} needs a GPU, and this machine has fewer than check.devices={cfg.check.devices}: "
            f"{one.problem}; check it on a machine that has them"
        )
    print(one.traceback or one.output, file=sys.stderr)
    log.error("%s fails in one process, before any strategy is tried: %s", name, one.problem)
    raise RunEnded(ExitCode.FAILED)


def _is_zero(node: Mapping[str, Any]) -> bool:
    return str(node.get("_target_")).endswith(".DeepSpeed")
