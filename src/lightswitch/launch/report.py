"""The lines that a run logs at its start and end, and the result files that it writes."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from lightswitch import regular_files
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints import weight_files
from lightswitch.checkpoints.last import best_or_last, position_of
from lightswitch.checkpoints.reading import Reader
from lightswitch.context import RunContext
from lightswitch.errors import Refused, shown
from lightswitch.launch import commands, stages
from lightswitch.launch.build import shards_itself
from lightswitch.launch.stages import Metrics
from lightswitch.monitoring.display import table
from lightswitch.runs import resume
from lightswitch.runs.resume import Beginning

log = logging.getLogger(__name__)

_LARGEST_COPIED_BYTES = 2 * 10**9  # of a checkpoint: reading and comparing it takes some seconds
_EVALUATIONS = ("test", "validate")  # the suggested command uses the first mode that the module supports


@rank_zero_only
def begin(cfg: DictConfig, run: RunContext, trainer: Trainer, plan: BatchPlan, start: Beginning) -> None:
    """Log strategy, batch, run directory and the checkpoint that the run starts from."""
    accelerator = type(trainer.accelerator).__name__.removesuffix("Accelerator")
    nodes = f"{trainer.num_nodes} node{'s' if trainer.num_nodes > 1 else ''}"
    world = f"{nodes} × {trainer.num_devices} {accelerator}"
    log.info("strategy   %s, precision %s, %s", type(trainer.strategy).__name__, trainer.precision, world)
    if shards_itself(cfg):
        log.info("batch      of each device's data loader × accumulation %d", plan.accumulation)
    else:
        log.info("batch      %s", plan)
    log.info("run        %s", shown(run.run_dir))
    if start.path is not None and cfg.mode == "fit":
        changed = resume.changes_since(_run_dir_of(start.path), cfg)
        log.info("resumes    %s%s", start, f", with {changed}" if changed else "")
    elif start.path is not None:
        log.info("reads      %s", start)


@rank_zero_only
def end(cfg: DictConfig, run: RunContext, trainer: Trainer, metrics: Metrics) -> None:
    """Write results.json and the end in run.json, and log the metrics and the commands to run next."""
    of_training = resume.read_results(run.run_dir) if cfg.mode != "fit" and resume.has_trained(run.run_dir) else {}
    regular_files.write_json(run.run_dir / resume.RESULTS, of_training | metrics)
    rows: dict[str, object] = {
        name: value
        for name, value in metrics.items()
        # of a metric that is logged by step and by epoch, the last batch of one device stands in results.json alone
        if not name.startswith("lr-")
        and not (name.endswith("_step") and f"{name.removesuffix('_step')}_epoch" in metrics)
    }
    import psutil  # slow, and not needed before the end

    rows["time in all"] = timedelta(seconds=time.time() - psutil.Process().create_time())
    log.info("\n%s\n", table(rows))
    last = run.run_dir / "checkpoints" / "last.ckpt"
    position = position_of(last) if last.exists() else None
    go_on = commands.go_on(cfg, run.placement, position) if position else None
    is_trial = trainer.fast_dev_run  # type: ignore[attr-defined]  # set past Lightning's declaration
    has_ended = cfg.mode == "fit" and not (trainer.interrupted or is_trial)
    next_steps = _told(run, go_on, _mode_of_evaluation(trainer)) | (_weights(run.run_dir) if has_ended else {})
    for what, text in next_steps.items():
        log.info("%-10s %s", what, text)
    if has_ended:
        resume.write_end(cfg, run.run_dir, trainer.global_step, go_on)


def _told(run: RunContext, go_on: str | None, mode: str | None) -> dict[str, str]:
    """Return the lines to log at the end, by label: paths, and commands to run next.

    Args:
        mode: the mode that can evaluate a checkpoint; None if the module supports none.
    """
    run_dir = run.run_dir
    if run.mode == "predict":
        return {"written": shown(run_dir / "predictions")}
    table = run_dir / "metrics.csv"
    rows = {"metrics": shown(table)} if table.exists() else {}
    if run.mode != "fit":
        return rows
    if go_on:
        rows["go on"] = go_on
    if mode and (checkpoint := best_or_last(run_dir)) is not None:
        rows["evaluate"] = commands.evaluate(shown(checkpoint), run.placement, mode)
    if (run_dir / "tensorboard").exists():
        rows["look"] = shlex.join(["tensorboard", "--logdir", shown(run_dir.parent)])
    return rows


def _weights(run_dir: Path) -> dict[str, str]:
    """Write the weights of a finished run to a file for `load_from_checkpoint`, and return its path by label.

    For a large checkpoint directory, write no file, and return the command that exports it. The file is a convenience
    and not part of the run's state: failing to write it doesn't fail the run.
    """
    checkpoint = best_or_last(run_dir)
    if checkpoint is None:
        return {}
    file = run_dir / weight_files.OF_RUN
    command = shlex.join(["python", "-m", "lightswitch.export", shown(run_dir), "-o", shown(file)])
    if checkpoint.is_dir() and sum(part.stat().st_size for part in checkpoint.iterdir()) > _LARGEST_COPIED_BYTES:
        return {"export": command}
    try:
        model = regular_files.read_yaml(run_dir / "config.yaml", resolve=False)["model"]
        weight_files.write(Reader(checkpoint, group=None), model, file)
    except (OSError, ValueError, Refused) as error:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # a file from an earlier end of the run has other weights
        log.warning("weights    %s was not written: %s; to write it later, type %s", file.name, error, command)
        return {}
    return {"weights": shown(file)}


def _mode_of_evaluation(trainer: Trainer) -> str | None:
    model, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]  # set past its declaration
    return next((mode for mode in _EVALUATIONS if not stages.lacking(mode, model, data)), None)


def _run_dir_of(checkpoint: Path) -> Path:
    return checkpoint.parent.parent if checkpoint.parent.name.startswith("checkpoints") else checkpoint.parent
