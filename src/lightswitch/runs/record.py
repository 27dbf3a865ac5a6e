"""Record of a run in its directory: everything needed to repeat it, its starts, its loggers and its predictions."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from lightswitch import patches
from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints import directory
from lightswitch.config.confidential import is_of_environment, masked, masked_override, public
from lightswitch.config.overrides import typed_overrides
from lightswitch.context import RunContext
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import callbacks_of
from lightswitch.monitoring.metrics import WORLD, purge
from lightswitch.monitoring.notices import Notices
from lightswitch.runs import claim, resume
from lightswitch.runs import log as run_log
from lightswitch.runs.resume import End, Start

log = logging.getLogger(__name__)

_PACKAGES = ("lightswitch", "torch", "lightning", "torchmetrics", "hydra-core", "deepspeed", "numpy")
_LOCAL = (CSVLogger, TensorBoardLogger)  # they need no connection, and write in the run directory when they are opened


@dataclass(frozen=True)
class Origin:
    """Origin of a run, as written to run.json.

    Args:
        command: command of the last start, quoted for a shell.
        overrides: overrides of the command line.
        folder: the working directory.
        commit: commit of the git repository that contains train.py; null if there is none.
        uncommitted_changes: whether tracked files of the repository differed from that commit.
        python: version of Python.
        host: the machine of rank zero.
        packages: versions of installed packages, by name.
        starts: starts of the run, the first one first: step, machines in rank order, devices of each, steps trained
            again.
        ended: the end of the run; null until fit and test have ended.
    """

    command: str
    overrides: list[str]
    folder: str
    commit: str | None
    uncommitted_changes: bool
    python: str
    host: str
    packages: dict[str, str]
    starts: list[Start] = field(default_factory=list)
    ended: End | None = None


class RunRecord(Callback):
    """Write ``.hydra/``, ``config.yaml`` with resolved values, and ``run.json`` with commit, versions and command.

    run.json also lists the starts of the run, and a change of its machines is logged. Values that the config takes from
    the environment remain interpolations in all of these files and in the hyperparameters of checkpoints, and what is
    named like a secret is masked.

    Rank 0 writes them once the run begins, when its checkpoint fits on all ranks. Until then the files of an earlier
    run stay unchanged. Therefore train.log and the loggers, which would open their files before a checkpoint is read,
    also wait.

    Each rank writes its predictions to ``predictions/rank_<n>.pt``: ranks have contiguous shares, so the files in rank
    order are in the order of the dataset. Over a stream, ranks take turns: the first batch of each file in rank order,
    then the second batch of each.
    """

    def __init__(self, cfg: DictConfig, run: RunContext, batch: GlobalBatch) -> None:
        self.run, self.batch = run, batch
        self.run_dir = run.run_dir
        self.mode, self.start_at = cfg.mode, cfg.ckpt_path or cfg.resume
        self._origin = _origin(run) if run.is_first else None
        self._goes_on = False
        self._loggers: list[Logger] = []
        self._config = public(cfg)
        self.files = _files(cfg, run, self._config) if run.is_first else {}
        # an evaluation in the directory of a training adds to its metrics, and leaves its record as it is
        self._is_beside_training = cfg.mode != "fit" and resume.has_trained(self.run_dir)
        is_logging = cfg.trainer.get("enable_autolog_hparams") is not False
        self._logs_hyperparameters = is_logging and not self._is_beside_training

    def hold_loggers(self, trainer: Trainer) -> None:
        """Remove the loggers from the Trainer until `setup`, so that it does not open them.

        The Trainer must not log hyperparameters itself, because that opens the loggers as well.
        """
        self._loggers, trainer.loggers = trainer.loggers, []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the loggers; Lightning has passed the point at which it opens them."""
        trainer.loggers = self._loggers
        if stage != self.mode:  # a test after fit is the same run
            self._goes_on = True
            _open(trainer.loggers)
            self._begin_log(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch.check_start(trainer)  # before a file of an earlier run is changed
        self._go_on(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.mode == "validate":
            self._go_on(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._go_on(trainer)  # also if the checkpoint was at the last step and no batch was read

    on_test_start = on_predict_start = on_fit_end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, module in _modules(trainer).items():  # the module keeps the values
            key = module.CHECKPOINT_HYPER_PARAMS_KEY
            if key in checkpoint:
                checkpoint[key] = _public(checkpoint[key], self._config.get(name))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        share = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if trainer.global_rank % (trainer.world_size // share["num_replicas"]):
            return  # another rank of a tensor-parallel group has predicted the same
        folder = self.run_dir / "predictions"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.predict_loop.predictions, folder / f"rank_{share['rank']}.pt")
        for path in folder.glob("rank_*.pt") if trainer.is_global_zero else ():
            number = path.stem.removeprefix("rank_")
            if number.isdecimal() and int(number) >= share["num_replicas"]:  # of an earlier start on more devices
                path.unlink()

    def _go_on(self, trainer: Trainer) -> None:
        if self._goes_on:
            return
        self._goes_on = True
        goes_on = trainer.is_global_zero and self.start_at != "never"
        earlier = resume.starts(self.run_dir) if goes_on else []
        own = self._start(trainer) if trainer.is_global_zero and self.mode == "fit" else None
        if own and trainer.checkpoint_callbacks and not getattr(trainer, "fast_dev_run", False):
            directory.try_out(self.run_dir / "checkpoints")
        step = self.batch.first_logged_step(trainer)
        _open(logger for logger in trainer.loggers if not isinstance(logger, _LOCAL))  # one may fail to connect
        if trainer.is_global_zero and not self._is_beside_training:
            self._write(trainer, [*earlier, *([own] if own else [])])
        _open(logger for logger in trainer.loggers if isinstance(logger, _LOCAL))
        for logger in trainer.loggers if own and earlier else ():
            purge(logger, step)
        self._begin_log(trainer)
        if own and earlier and (change := own.change_from(earlier[-1])):
            log.info("world      %s", change)
            for logger in trainer.loggers:
                logger.log_metrics({WORLD: trainer.world_size}, step=step)

    def _start(self, trainer: Trainer) -> Start:
        return Start(
            step=trainer.global_step,
            hosts=self.run.process.hosts or [platform.node()],
            devices=trainer.num_devices,
            trained_twice=max(0, resume.logged_steps(self.run_dir) - trainer.global_step),
            job=claim.job() or "",
        )

    def _write(self, trainer: Trainer, starts: list[Start]) -> None:
        """Write all files beside the earlier ones, and then replace these: all, or none on a full disk.

        Raises:
            Refused: the files can't be written.
        """
        files = {self.run_dir / name: text for name, text in self.files.items()}
        assert self._origin is not None
        record = asdict(replace(self._origin, starts=starts))
        files[self.run_dir / resume.RECORD] = json.dumps(record, indent=2) + "\n"
        try:
            for path, text in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(f"{path.name}.partial").write_text(text)
            if self.start_at == "never":
                self._set_aside(trainer)
            for path in files:
                path.with_name(f"{path.name}.partial").replace(path)
        except OSError as error:
            for path in files:
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
            raise Refused(f"the run directory can't be written: {error}") from error
        if self.mode == "fit":
            directory.finish_changes(self.run_dir / "checkpoints")

    def _set_aside(self, trainer: Trainer) -> None:
        """Move the checkpoints and metrics of an earlier training, of which a start anew has none."""
        folders = [Path(logger.log_dir) for logger in trainer.loggers if logger.log_dir]
        inside = [folder for folder in folders if self.run_dir.absolute() in folder.absolute().parents]
        for path in {self.run_dir / "checkpoints", self.run_dir / "metrics.csv", *inside}:
            if path.exists():
                path.rename(_vacant(path))

    def _begin_log(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            run_log.begin()
        if self._logs_hyperparameters:
            log_hyperparameters(trainer, {**self._config, "sizes": _sizes(trainer, self.batch.plan)})


def _vacant(path: Path) -> Path:
    """Return the first free numbered name beside a path: for `checkpoints`, `checkpoints_1`, `checkpoints_2`, …"""
    others = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
    return next(other for other in others if not other.exists())


def _sizes(trainer: Trainer, plan: BatchPlan) -> dict[str, int]:
    """Return the sizes of model, world and batch, which a config may leave to strategy=auto, the machine or null."""
    (size,) = (callback for callback in callbacks_of(trainer) if isinstance(callback, Notices))
    return {
        **size.counts,
        "nodes": trainer.num_nodes,
        "devices": trainer.world_size,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
    }


def _open(loggers: Iterable[Logger]) -> None:
    """Open loggers as Lightning does, in the same order.

    Raises:
        Refused: Weights & Biases has no key, or another setting is unusable.
    """
    for logger in sorted(loggers, key=lambda logger: not isinstance(logger, WandbLogger)):
        try:
            getattr(logger, "experiment", None)
        except Exception as error:
            if type(error).__name__ != "UsageError":  # of Weights & Biases, which may not be installed
                raise
            message = " ".join(str(error).split())
            raise Refused(f"logger: wandb: {message} Or export WANDB_MODE=offline, for an offline run") from error


def _files(cfg: DictConfig, run: RunContext, resolved: dict[str, Any]) -> dict[str, str]:
    typed = [masked_override(override) for override in typed_overrides(run.hydra)]
    return {  # the first two as Hydra writes them as soon as it has composed a config
        ".hydra/config.yaml": _yaml(masked(OmegaConf.to_container(cfg))),
        ".hydra/overrides.yaml": _yaml(typed),
        "config.yaml": _yaml(resolved),
    }


def _origin(run: RunContext) -> Origin:
    return Origin(
        command=shlex.join([sys.executable, *map(masked_override, sys.argv)]),
        overrides=[masked_override(override) for override in typed_overrides(run.hydra)],
        folder=str(Path.cwd()),
        commit=git_of_code("rev-parse", "HEAD"),
        uncommitted_changes=bool(git_of_code("status", "--porcelain", "--untracked-files=no")),
        python=platform.python_version(),
        host=platform.node(),
        packages=patches.versions(_PACKAGES),
    )


def _yaml(plain: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def git_of_code(*arguments: str) -> str | None:
    """Return git's output for the repository that contains train.py; None if there is no repository or no git."""
    code = Path(sys.argv[0]).resolve().parent
    others_too = ("-c", "safe.directory=*")  # also another user's checkout, whose code this process runs anyway
    git = ["git", "--no-optional-locks", *others_too, "-C", str(code)]
    try:
        done = subprocess.run([*git, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _public(arguments: Mapping[str, Any], node: Any) -> dict[str, Any]:
    """Return saved arguments masked, and those of the environment as the config's node has them."""
    outside = {name: value for name, value in node.items() if is_of_environment(value)} if node else {}
    found: dict[str, Any] = masked({name: outside.get(name, value) for name, value in arguments.items()})
    return found


def log_hyperparameters(trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Send loggers the arguments that module and data have saved, as Lightning does, and the config.

    Args:
        config: of the run, as it is written, with the sizes of model, world and batch. Its keys override saved
            arguments.

    Raises:
        Refused: module and data have saved an argument of the same name, with different values.
    """
    modules = {name: module for name, module in _modules(trainer).items() if module._log_hyperparams}
    arguments = [_public(module.hparams_initial, config.get(name)) for name, module in modules.items()]
    first, last = (arguments[0], arguments[-1]) if arguments else ({}, {})
    if differing := [name for name in first if name in last and repr(first[name]) != repr(last[name])]:
        raise Refused(
            f"model and data have both saved {', '.join(differing)}, with different values, but loggers store only "
            "one; add ignore=[...] to one save_hyperparameters call"
        )
    for logger in trainer.loggers:
        if params := {**first, **last, **config}:
            logger.log_hyperparams(params)
        logger.log_graph(trainer.lightning_module)
        logger.save()


def _modules(trainer: Trainer) -> dict[str, Any]:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # undeclared
    return {"model": trainer.lightning_module, **({"data": data} if data else {})}
