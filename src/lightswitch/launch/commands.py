"""What to type once a run has ended, each command as it can be pasted."""

from __future__ import annotations

import itertools
import shlex
import sys

from omegaconf import DictConfig

from lightswitch.batches.position import Position
from lightswitch.cluster.placement import Placement
from lightswitch.config.overrides import quoted, shortened

_PLACE = ("run_id", "resume", "init_from", "hydra.mode")  # where a run starts: it goes on in its own directory
_READ_BY_FIT_ALONE = (
    *("mode", "ckpt_path", "run_id", "resume", "init_from", "debug"),
    *("optimizer", "scheduler", "lr_scaling", "callbacks", "logger", "hydra"),
    *(f"trainer.{limit}_{unit}" for limit in ("min", "max") for unit in ("steps", "epochs", "time")),
    *(f"trainer.limit_{stage}_batches" for stage in ("train", "val")),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    *("trainer.log_every_n_steps", "trainer.detect_anomaly", "trainer.overfit_batches", "trainer.enable_checkpointing"),
)


def go_on(cfg: DictConfig, place: Placement, position: Position) -> str | None:
    """With the limits that the run has reached, doubled; None where it ended before them."""
    reached = {"max_steps": position.global_step, "max_epochs": position.epoch}
    limits = {name: cfg.trainer.get(name) for name in reached}
    raised = {f"trainer.{name}": 2 * reached[name] for name, limit in limits.items() if _holds(limit, reached[name])}
    if not raised:
        return None
    typed = _overrides(without=(*_PLACE, *raised))
    return shlex.join(
        [*_program(place), *typed, f"run_id={cfg.run_id}", *(f"{name}={raised[name]}" for name in raised)]
    )


def again(cfg: DictConfig, place: Placement) -> str:
    """The same, in the same directory."""
    return shlex.join([*_program(place), *_overrides(without=_PLACE), f"run_id={cfg.run_id}"])


def evaluate(checkpoint: str, place: Placement) -> str:
    """With what makes the model and its data, and spreads them over devices."""
    typed = _overrides(without=_READ_BY_FIT_ALONE)
    return shlex.join([*_program(place), *typed, "mode=test", f"ckpt_path={quoted(checkpoint)}"])


def _holds(limit: int | None, reached: int) -> bool:
    return limit is not None and 0 < limit <= reached


def _overrides(without: tuple[str, ...]) -> list[str]:
    """Of the command line, those that set none of some keys, nor what is below them."""
    typed = list(map(shortened, sys.orig_argv[_script_index(sys.orig_argv) + 1 :]))
    return [word for word in typed if not any(_sets(word.lstrip("+~").partition("=")[0], key) for key in without)]


def _sets(key: str, wanted: str) -> bool:
    return key == wanted or key.startswith((f"{wanted}.", f"{wanted}/", f"{wanted}@"))


def _program(place: Placement) -> list[str]:
    """What starts the script, with its launcher."""
    script = sys.orig_argv[_script_index(sys.orig_argv)]
    if place.launcher == "torchrun":
        return ["torchrun", *_options_of_torchrun(place), script]
    if place.launcher == "slurm":
        return ["srun", f"--nodes={place.nodes}", f"--ntasks-per-node={place.devices_per_node}", "python", script]
    return ["python", script]


def _options_of_torchrun(place: Placement) -> list[str]:
    """As they were typed on this node: the processes themselves do not know how the nodes met."""
    import psutil  # when needed: a mistake is to be told at once

    agent = psutil.Process().parent()
    words = agent.cmdline() if agent is not None else []
    typed = list(itertools.dropwhile(lambda word: not word.startswith("--"), words[: _script_index(words)]))
    return typed or [f"--nproc-per-node={place.devices_per_node}"]


def _script_index(words: list[str]) -> int:
    return next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
