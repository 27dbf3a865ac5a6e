"""The checkpoints that a run resumes from: the moment at which they are taken, how many stay, the newest good one."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightswitch import patches
from lightswitch.batches.plan import Position, saved_position
from lightswitch.checkpoints import directory, names
from lightswitch.checkpoints.format import PlainTypes
from lightswitch.checkpoints.optimizers import options_of
from lightswitch.checkpoints.reading import Reader, unreadable
from lightswitch.checkpoints.shards import local
from lightswitch.errors import Refused, UnfitCheckpoint, listed, shown
from lightswitch.hooked_strategy import callbacks_of
from lightswitch.regular_files import linked, write_link

log = logging.getLogger(__name__)

FROZEN_SINCE = "frozen_since"  # in a checkpoint: whether parameters are frozen that changed since the run began
_SAMPLED_ELEMENTS = 64  # of each parameter, compared over the hooks on_train_start of a resumed run
_ENDED_EARLY = "ended_early"  # in a checkpoint: training was asked to stop, and by no limit of time
_CONFIGURED = "configured"  # in a checkpoint: options of optimizers and states of schedules at the start of the run


class StepBoundary(Callback):
    """Callback of the moment between two steps, at which all checkpoints of a run are taken.

    All hooks of the step before have run, its validation and the end of its epoch included, and no hook of a user of
    the next step. Before the first step of an epoch, it is the epoch's start. The end of training is such a moment,
    too; where a limit cuts the last epoch short, the moment is before that epoch's end, so that a longer run goes on
    from it as if it had been as long from the start.

    A checkpoint that a callback or the module asks for at another moment is put off to this one. It would have the
    effects of some hooks of a step only, and be without its validation, and no resumed run could make up for that.
    List this callback before those of the user.

    A checkpoint also has which parameters training has frozen or unfrozen, and the options that its run began with:
    what is configured otherwise now takes effect.

    Args:
        init_from: the weights of a new run: a checkpoint of any strategy, written by the engine or by Lightning, or
            safetensors. A run that resumes from its own checkpoint ignores it.
        init_names: prefixes of names in the file, with the model's prefix for each; None to take all weights, or of
            safetensors those that fit.
        ends_again: end a run that is resumed where it has stopped early, as when it was killed in its test.
    """

    def __init__(
        self, init_from: str | None = None, init_names: Mapping[str, str] | None = None, ends_again: bool = False
    ) -> None:
        self._init_from, self._init_names, self._ends_again = init_from, init_names, ends_again
        self._puts_off = False
        self._waiting: list[Callable[[], None]] = []  # saves that are put off, and what follows each, in order
        self._last: list[LastCheckpoints] = []
        self._frozen: dict[str, bool] = {}  # at the start of the run, as the next one
        self._configured: dict[str, Any] = {}
        self._resumed: dict[str, Tensor] = {}  # some elements of each weight of a checkpoint, until the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            patches.replace(
                trainer, "save_checkpoint", functools.partial(self._save_or_put_off, trainer.save_checkpoint)
            )
            if hasattr(trainer.strategy, "waiting"):  # of portable checkpoints
                trainer.strategy.waiting = self._waiting

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # before a checkpoint is read
        self._frozen = _frozen(pl_module)
        self._configured = _configured(trainer)
        if self._init_from and trainer.ckpt_path is None:
            if not hasattr(trainer.strategy, "start_from"):
                raise Refused(
                    f"init_from: {type(trainer.strategy).__name__} can't read checkpoints of other strategies"
                )
            trainer.strategy.start_from(Path(self._init_from), self._init_names)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        frozen = _frozen(pl_module)
        checkpoint[FROZEN_SINCE] = {
            name: frozen[name] for name, one in self._frozen.items() if frozen.get(name, one) != one
        }
        checkpoint[_CONFIGURED] = self._configured
        timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
        is_timed_out = any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)
        checkpoint[_ENDED_EARLY] = trainer.should_stop and not is_timed_out

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        frozen = checkpoint.get(FROZEN_SINCE, {})
        for name, parameter in names.parameters(pl_module).items():
            if name in frozen:
                parameter.requires_grad_(not frozen[name])
        if _CONFIGURED in checkpoint:
            reconfigure(trainer, checkpoint, checkpoint[_CONFIGURED], self._configured)
        if self._ends_again and checkpoint.get(_ENDED_EARLY):
            trainer.should_stop = True
            if trainer.is_global_zero:
                log.info("ended      early, at this step; resume=last goes on")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, LastCheckpoints)]
        self._puts_off = True
        self._resumed = _sampled(pl_module) if trainer.ckpt_path is not None else {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_and_go_on(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % trainer.accumulate_grad_batches == 0:
            self._save_and_go_on(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():  # a limit has cut the epoch short
            self._take_put_off()
            for last in self._last:
                last.save(trainer)
            self._puts_off = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_put_off()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._puts_off = False  # for callbacks that save the weights of a run that fails

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        patches.restore(trainer, "save_checkpoint")

    def _save_and_go_on(self, trainer: Trainer) -> None:
        if self._resumed:
            self._refuse_set_weights(trainer.lightning_module)
        self._take_put_off()
        for last in self._last:
            last.save_if_due(trainer)
        self.end_if_asked(trainer)
        self._puts_off = True

    def _refuse_set_weights(self, module: LightningModule) -> None:
        now = _sampled(module)
        if changed := [name for name, one in self._resumed.items() if not torch.equal(one, now[name])]:
            raise Refused(
                f"on_train_start has set {listed(changed, 'parameters')}, but the run is resumed, with the weights of "
                "its checkpoint; set initial weights in the constructor, or only if self.global_step == 0"
            )
        self._resumed = {}

    def end_if_asked(self, trainer: Trainer) -> None:
        """End training here if it is asked to; subclasses know by whom."""

    def _save_or_put_off(self, save: Callable[..., None], filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):  # the write makes it again, and raises the error
            Path(filepath).parent.mkdir(parents=True, exist_ok=True)  # Lightning links to it before it is written
        if self._puts_off:
            self._waiting.append(functools.partial(save, filepath, *args, **kwargs))
        else:
            save(filepath, *args, **kwargs)

    def _take_put_off(self) -> None:
        self._puts_off = False
        while self._waiting:
            self._waiting.pop(0)()


def _frozen(module: LightningModule) -> dict[str, bool]:
    return {name: not parameter.requires_grad for name, parameter in names.parameters(module).items()}


@torch.no_grad()
def _sampled(module: LightningModule) -> dict[str, Tensor]:
    parts = {name: local(parameter) for name, parameter in names.parameters(module).items()}
    return {name: part.flatten()[:_SAMPLED_ELEMENTS].cpu().clone() for name, part in parts.items()}


def _configured(trainer: Trainer) -> dict[str, Any]:
    groups = [[options_of(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    schedules = [{"state": config.scheduler.state_dict()} for config in trainer.lr_scheduler_configs]
    configured: dict[str, Any] = PlainTypes(keeps_kinds=False).of({"groups": groups, "schedules": schedules})
    return configured


def reconfigure(trainer: Trainer, checkpoint: dict[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Let the options of optimizers and schedules that are configured otherwise than in a checkpoint take effect in it.

    An option takes its new value, and a rate changes by the same factor. A schedule, such as a cosine over a longer
    run, goes on as if it had been so from the start; one that depends on a metric keeps what it has seen.

    Args:
        was: the configuration at the start of the run that saved the checkpoint.
        now: that of this run.
    """
    saved = [group for optimizer in checkpoint["optimizer_states"] for group in optimizer["param_groups"]]
    of_was, of_now = ([group for groups in one["groups"] for group in groups] for one in (was, now))
    for group, before, today in zip(saved, of_was, of_now, strict=False):
        group.update({key: today[key] for key in today if key != "lr" and key in before and today[key] != before[key]})
        key = "initial_lr" if "initial_lr" in before and "initial_lr" in today else "lr"  # a warm-up may begin at zero
        if key in before and today.get(key) != before[key]:
            group["lr"] = group["lr"] * today[key] / before[key] if before[key] else today[key]
    for index, (config, before, today) in enumerate(
        zip(trainer.lr_scheduler_configs, was["schedules"], now["schedules"], strict=False)
    ):
        state, schedule = checkpoint["lr_schedulers"][index], config.scheduler
        steps = [one["last_epoch"] for one in (state, *state.get("_schedulers", ())) if "last_epoch" in one]
        is_same = before["state"] == today["state"] and type(schedule) is not LambdaLR  # whose function is not saved
        if is_same or isinstance(schedule, ReduceLROnPlateau) or not steps:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not been stepped before
            for _ in range(steps[0]):
                schedule.step()
        checkpoint["lr_schedulers"][index] = schedule.state_dict()
        optimizer = next((n for n, one in enumerate(trainer.optimizers) if one is schedule.optimizer), 0)
        of_optimizer = checkpoint["optimizer_states"][optimizer]["param_groups"]
        for group, stepped in zip(of_optimizer, schedule.optimizer.param_groups, strict=False):
            group.update({key: stepped[key] for key in ("lr", "momentum", "betas") if key in stepped})
    for callback in callbacks_of(trainer):
        if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
            checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience


_NAME = re.compile(r"step_(0|[1-9]\d{0,17})\.ckpt")  # names of the checkpoints that `save` writes


class LastCheckpoints(Checkpoint):
    """Callback that writes ``folder``/step_<n>.ckpt every n optimizer steps and at the end of training.

    ``folder``/last.ckpt is a link to the newest complete checkpoint. Lightning's `save_last` follows the last *best*
    one, and writes nothing at the end of a run whose length is not a multiple of its interval.

    `StepBoundary` calls it between steps, when all hooks of the step before have run.

    Args:
        folder: the directory to write them to.
        every_n_steps: optimizer steps between two checkpoints.
        keep: number of the newest checkpoints to keep; an older one is removed once a newer one is complete.
        keep_every_n_steps: checkpoints at multiples of this step are never removed.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, folder: str, every_n_steps: int, keep: int = 2, keep_every_n_steps: int | None = None) -> None:
        counts = {"every_n_steps": every_n_steps, "keep": keep, "keep_every_n_steps": keep_every_n_steps or 1}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}, expected at least 1")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.keep_every_n_steps = keep_every_n_steps
        self._saved_step = 0  # of the last save, or the start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own, resumed = self._path(trainer), linked(Path(trainer.ckpt_path)) if trainer.ckpt_path is not None else None
        is_own = resumed is not None and resumed.resolve() == own.resolve()
        # another run's, or one of this run that was written before it was killed, such as the best: this step is due
        self._saved_step = trainer.global_step - (resumed is not None and not is_own)
        if is_own and trainer.is_global_zero:
            self._point_to(own)  # a run killed between saving and linking left last.ckpt at the previous checkpoint

    def save_if_due(self, trainer: Trainer) -> None:
        """Save a checkpoint if the interval is over; called between steps."""
        if trainer.global_step // self.every_n_steps > self._saved_step // self.every_n_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this step, unless it is already saved."""
        is_saved = trainer.global_step == self._saved_step
        if is_saved or getattr(trainer, "fast_dev_run", False):  # an attribute that Lightning does not declare
            return
        self._saved_step = trainer.global_step
        path = self._path(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            # without `once_saved`, as in a strategy of the user, the checkpoint is already written
            once_saved = getattr(trainer.strategy, "once_saved", lambda action: action())
            once_saved(lambda: self._point_to(path))

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"step_{trainer.global_step}.ckpt"

    def _point_to(self, path: Path) -> None:
        write_link(self.folder / "last.ckpt", path.name)
        for old in self._outdated(path):
            directory.remove(old)

    def _outdated(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove, including those of earlier starts, but none after the step of `newest`."""
        newest_step = _step(newest)
        assert newest_step is not None
        steps = {path: step for path in self.folder.iterdir() if (step := _step(path)) is not None}
        older = sorted((path for path, step in steps.items() if step <= newest_step), key=lambda path: steps[path])
        every = self.keep_every_n_steps or newest_step + 1
        return [path for path in older[: -self.keep] if steps[path] % every]


def _step(path: Path) -> int | None:
    """Return the step in the name of one of these checkpoints; None for anything else in the folder."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named and path.is_dir() and not path.is_symlink() else None


_WRITTEN = re.compile(r".+\.ckpt(\.previous)?", re.DOTALL)


def newest(run_dir: Path) -> tuple[Path, Position] | None:
    """Return the checkpoint of a run that is furthest in training, and its position; None if there is none yet.

    Its tensors are not checked here: all ranks check them together when they read them.

    Raises:
        UnfitCheckpoint: there are checkpoints, but none of them can be read.
    """
    readable, damaged = _found(run_dir)
    if damaged and not readable:
        raise _all_damaged(damaged)
    _warn_of(damaged)
    return readable[0] if readable else None


def best_or_last(run_dir: Path) -> Path | None:
    """Return the best checkpoint of a run, else its last; None if it has neither yet."""
    named = (run_dir / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    return next((path for path in named if path.exists()), None)


def checkpoints_up_to(path: Path, run_dir: Path) -> list[Path]:
    """Return the candidates for a resume: a checkpoint, then the run's earlier ones if it belongs to the run."""
    readable = [own for own, _ in _found(run_dir)[0]]
    return readable[readable.index(path) :] if path in readable else [path]


def later_than(step: int, run_dir: Path) -> list[Path]:
    """Return the readable checkpoints of a run that are further in training than a step of the loop."""
    return [path for path, position in _found(run_dir)[0] if position.global_step > step]


def first_whole(
    candidates: list[Path], group: dist.ProcessGroup | None, live: Mapping[str, nn.Parameter] | None = None
) -> Reader:
    """Return a reader of the first undamaged checkpoint. Collective.

    Args:
        candidates: in the order of preference.
        group: the process group of the ranks that read together; None for a single process.
        live: see `Reader`.

    Raises:
        UnfitCheckpoint: on every rank, if all of them are damaged.
    """
    damaged: list[UnfitCheckpoint] = []
    for path in candidates:
        try:
            reader = Reader(path, group, live=live)
        except UnfitCheckpoint as error:
            damaged.append(error)
            continue
        _warn_of(damaged, instead=path)
        return reader
    raise _all_damaged(damaged)


def position_of(path: Path) -> Position | None:
    """Return a checkpoint's position in training; None if the engine has not written it.

    Raises:
        UnfitCheckpoint: it can't be read. Its tensors are not checked.
    """
    reader = Reader(path, group=None, compares_tensors=False)
    try:
        return None if reader.is_foreign else saved_position(reader.state)
    except ValueError as error:
        raise unreadable(path, str(error)) from error


def _found(run_dir: Path) -> tuple[list[tuple[Path, Position]], list[UnfitCheckpoint]]:
    """Return the readable checkpoints of a run, the furthest in training first, and the errors of the others."""
    readable, damaged = [], []
    for path in _named(run_dir / "checkpoints"):
        try:
            if (position := position_of(path)) is not None:
                readable.append((path, position))
        except UnfitCheckpoint as error:
            damaged.append(error)
    readable.sort(key=lambda found: (found[1].global_step, found[0].name), reverse=True)  # of equal ones, step_<n>.ckpt
    return readable, damaged


def _named(folder: Path) -> list[Path]:
    """Return the directories in a folder that are named as checkpoints, without files and links.

    Raises:
        UnfitCheckpoint: the folder can't be listed. A run that has checkpoints must not start anew for that reason.
    """
    try:
        named = sorted(path for path in folder.iterdir() if _WRITTEN.fullmatch(path.name))
        return [path for path in named if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnfitCheckpoint(f"{shown(folder)} can't be listed: {error.strerror}") from error


@rank_zero_only
def _warn_of(damaged: list[UnfitCheckpoint], instead: Path | None = None) -> None:
    for error in damaged:
        log.warning("%s; skipping it", error)
    if damaged and instead:
        log.info("resumes    %s", shown(instead))


def _all_damaged(damaged: list[UnfitCheckpoint]) -> UnfitCheckpoint:
    message = "; ".join(map(str, damaged))
    return UnfitCheckpoint(f"{message}; start over with resume=never, or resume another one with resume=PATH")
