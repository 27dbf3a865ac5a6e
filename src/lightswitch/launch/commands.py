"""Commands that the engine suggests, for example to continue a run, in a form that can be pasted."""

from __future__ import annotations

import itertools
import os
import shlex
import sys

from omegaconf import DictConfig

from lightswitch.batches.plan import Position
from lightswitch.cluster.placement import NO_SHARED_STORE, Placement, elastic_nodes
from lightswitch.config.confidential import masked_override
from lightswitch.config.overrides import quoted, shortened

# keys that decide where a run starts, which these commands set themselves; in fit, ckpt_path is another
_START = ("run_id", "resume", "init_from", "hydra.mode")
_READ_ONLY_BY_FIT = (
    *("mode", "ckpt_path", "run_id", "resume", "init_from", "debug"),
    *("optimizer", "scheduler", "lr_scaling", "callbacks", "logger", "hydra"),
    *(f"trainer.{limit}_{unit}" for limit in ("min", "max") for unit in ("steps", "epochs", "time")),
    *(f"trainer.limit_{stage}_batches" for stage in ("train", "val")),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    *("trainer.log_every_n_steps", "trainer.detect_anomaly", "trainer.overfit_batches", "trainer.enable_checkpointing"),
)


def go_on(cfg: DictConfig, placement: Placement, position: Position) -> str | None:
    """Return the command that continues a run, with the limits it has reached doubled; None if it reached none.

    A run that ended before its steps, by `max_time`, continues without that.
    """
    reached = {"max_steps": position.steps, "max_epochs": position.epoch}
    limits = {name: cfg.trainer.get(name) for name in reached}
    ended = [name for name, limit in limits.items() if limit is not None and 0 < limit <= reached[name]]
    raised = [f"trainer.{name}={2 * reached[name]}" for name in ended]
    if not raised and cfg.trainer.get("max_time") is not None:
        raised = ["trainer.max_time=null"]
    if not raised:
        return None
    without = (*_START, "ckpt_path", *(word.partition("=")[0] for word in raised))
    return _again(placement, without, f"run_id={cfg.run_id}", *raised)


def repeat(cfg: DictConfig, placement: Placement) -> str:
    """Return the command that starts the same run again, in the same directory."""
    start = (*_START, "ckpt_path") if cfg.mode == "fit" else _START
    return _again(placement, start, f"run_id={cfg.run_id}")


def plan(nodes: int, devices_per_node: int) -> str:
    """Return the command that plans the run under every strategy, in one process."""
    words = ("mode=plan", "strategy=auto", f"trainer.num_nodes={nodes}", f"trainer.devices={devices_per_node}")
    replaced = ("mode", "strategy", "trainer.strategy", "trainer.num_nodes", "num_nodes", "trainer.devices")
    script = sys.orig_argv[_script(sys.orig_argv)]
    return _joined(["python", *script, *overrides((*_START, "ckpt_path", "micro_batch_size", *replaced)), *words])


def evaluate(checkpoint: str, placement: Placement, mode: str) -> str:
    """Return the command that evaluates a checkpoint in a mode, with the same model, data and devices."""
    return _again(placement, _READ_ONLY_BY_FIT, f"mode={mode}", f"ckpt_path={quoted(checkpoint)}")


def planned(placement: Placement, words: list[str]) -> str:
    """Return the command that starts a planned run, with the overrides that the plan recommends."""
    keys = [word.partition("=")[0] for word in words]
    return _again(placement, ("mode", "plan", "run_id", "device", *keys), *words)


def overrides(without: tuple[str, ...]) -> list[str]:
    """Return the command line's overrides, except those of some keys and of the keys below them."""
    typed = list(map(shortened, sys.orig_argv[_script(sys.orig_argv).stop :]))
    below = tuple(f"{key}{mark}" for key in without for mark in "./@=")
    return [word for word in typed if not f"{word.lstrip('+~')}=".startswith(below)]


def _again(placement: Placement, without: tuple[str, ...], *words: str) -> str:
    """Return the command that starts the script by its launcher, without some overrides and with others."""
    return _joined([*_program(placement), *overrides(without), *words])


def _joined(words: list[str]) -> str:
    """Return a command to print, in which values that are named like secrets are masked."""
    return shlex.join(map(masked_override, words))


def _program(placement: Placement) -> list[str]:
    """Return the command that starts the script with its launcher, as words."""
    script = sys.orig_argv[_script(sys.orig_argv)]
    if placement.launcher == "torchrun":
        survives = ["env", f"{NO_SHARED_STORE}=1"] if elastic_nodes() is not None else []
        return [*survives, "torchrun", *_options_of_torchrun(placement), *script]
    if placement.launcher == "slurm":
        tasks = [f"--nodes={placement.nodes}", f"--ntasks-per-node={placement.devices_per_node}"]
        gpus = [f"--gpus-per-node={count}"] if (count := os.environ.get("SLURM_GPUS_ON_NODE")) else []
        return ["srun", *tasks, *gpus, "python", *script]
    return ["python", *script]


def _options_of_torchrun(placement: Placement) -> list[str]:
    """Return torchrun's options from its command line on this node: its workers do not know the rendezvous."""
    import psutil  # only when needed: it takes long to import

    agent = psutil.Process().parent()
    words = agent.cmdline() if agent is not None else []
    typed = list(itertools.dropwhile(lambda word: not word.startswith("--"), words[: _script(words).start]))
    return typed or [f"--nproc-per-node={placement.devices_per_node}"]


def _script(words: list[str]) -> slice:
    """Return where the script is in a command's words."""
    at = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    return slice(at, at + 1)
