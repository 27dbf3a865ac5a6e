"""What a run says of itself at its beginning and its end."""

from __future__ import annotations

import copy
import logging
import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from lightswitch.batches.plan import BatchPlan
from lightswitch.launch.resume import shown
from lightswitch.launch.stages import Metrics
from lightswitch.monitoring.summary import table

log = logging.getLogger(__name__)


@rank_zero_only
def begin(cfg: DictConfig, model: LightningModule, trainer: Trainer, plan: BatchPlan, checkpoint: Path | None) -> None:
    accelerator = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    log.info("model      %s%s", type(model).__name__, _size(model))
    log.info(
        "strategy   %s, precision %s, %d node%s × %d %s",
        type(trainer.strategy).__name__, trainer.precision,
        trainer.num_nodes, "s" if trainer.num_nodes > 1 else "", trainer.num_devices, accelerator,
    )  # fmt: skip
    log.info("batch      %s", plan)
    log.info("run        %s", shown(_run_dir()))
    if checkpoint is not None:
        log.info("%s %s", "resumes   " if cfg.mode == "fit" else "reads     ", shown(checkpoint))


def _size(model: LightningModule) -> str:
    if is_overridden("configure_model", model):
        model = copy.deepcopy(model)
        try:
            with torch.device("meta"):  # takes no memory
                model.configure_model()
        except RuntimeError:  # it asks for the trainer, which it has not met yet
            return ""
    return f", {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters"


@rank_zero_only
def end(cfg: DictConfig, trainer: Trainer, plan: BatchPlan, metrics: Metrics) -> None:
    rows: dict[str, object] = {name: value for name, value in metrics.items() if not name.startswith("lr-")}
    rows["seconds in all"] = timedelta(seconds=time.time() - psutil.Process().create_time())
    log.info("\n%s\n", table(rows))
    for what, command in _next(cfg).items():
        log.info("%-10s %s", what, command)


def _next(cfg: DictConfig) -> dict[str, str]:
    """What to type next, each as it can be pasted."""
    run_dir = _run_dir()
    if cfg.mode == "predict":
        return {"written": shown(run_dir / "predictions")}
    if cfg.mode != "fit":
        return {"metrics": shown(run_dir / "metrics.csv")}
    again = [*_typed("run_id", "resume", "trainer.max_steps"), f"run_id={cfg.run_id}"]
    best = run_dir / "checkpoints" / "best.ckpt"
    checkpoint = best if best.exists() else run_dir / "checkpoints" / "last.ckpt"
    commands = {"metrics": shown(run_dir / "metrics.csv")}
    if checkpoint.exists():
        if cfg.trainer.max_steps > 0:  # -1: epochs are counted
            commands["go on"] = shlex.join([*again, f"trainer.max_steps={2 * cfg.trainer.max_steps}"])
        commands["evaluate"] = shlex.join([*_typed("run_id"), "mode=test", f"ckpt_path={shown(checkpoint)}"])
    if (run_dir / "tensorboard").exists():
        commands["look"] = shlex.join(["tensorboard", "--logdir", shown(run_dir.parent)])
    return commands


def _typed(*without: str) -> list[str]:
    """The command as it was typed, less some keys."""
    script = next(index for index, word in enumerate(sys.orig_argv) if word.endswith(".py"))
    words = sys.orig_argv[script:]
    return ["python", *(word for word in words if word.lstrip("+").partition("=")[0] not in without)]


def _run_dir() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)
