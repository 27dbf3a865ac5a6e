"""The checkpoints that a run goes on from: the newest that can be read, and those that it saves for that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from lightswitch import patches
from lightswitch.batches.plan import Position, saved_position
from lightswitch.checkpoints import directory
from lightswitch.checkpoints.ranks import describe_failure
from lightswitch.checkpoints.reader import Reader, is_foreign, is_hub, read_foreign, unreadable, why
from lightswitch.errors import UnfitCheckpoint, UnwrittenCheckpoint, shown
from lightswitch.mixins import callbacks_of

log = logging.getLogger(__name__)


_NAME = re.compile(r"step_(0|[1-9]\d{0,17})\.ckpt")  # the names that `save` gives
_KNOWN = ("lightning", "lightswitch")  # packages whose hooks at an epoch's end leave what is saved as it is


class LastCheckpoints(Checkpoint):
    """Callback that writes ``folder``/step_<n>.ckpt every so many optimizer steps and at the end of training.

    ``folder``/last.ckpt is a link to the newest complete one. Lightning's `save_last` follows the last *best* one, and
    writes nothing at the end of a run whose length is not a multiple of its interval.

    A checkpoint has what all hooks of its step have done, the module's own `on_train_batch_end` among them, which comes
    after those of callbacks: there many a module averages its weights. One of an epoch's last step is written before
    the validation, and once more after `on_train_epoch_end` where a module or a callback of the user's has one.

    Args:
        folder: that they are written to.
        every_n_steps: optimizer steps between two checkpoints.
        keep: how many of the newest stay; an older one is removed once a newer one is complete.
        keep_every_n_steps: checkpoints at multiples of it stay for ever.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, folder: str, every_n_steps: int, keep: int = 2, keep_every_n_steps: int | None = None) -> None:
        counts = {"every_n_steps": every_n_steps, "keep": keep, "keep_every_n_steps": keep_every_n_steps or 1}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it is at least 1")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.keep_every_n_steps = keep_every_n_steps
        self._counted_step = 0  # that intervals are counted from: the step of the last save, or of the start
        self._is_saved = True  # that step's checkpoint is this folder's own
        self._removed: set[Path] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
        patches.replace(batches, "on_advance_end", partial(self._end_batch, trainer, batches.on_advance_end))
        patches.replace(epochs, "on_advance_end", partial(self._end_epoch, trainer, epochs.on_advance_end))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        patches.restore(trainer.fit_loop.epoch_loop, "on_advance_end")
        patches.restore(trainer.fit_loop, "on_advance_end")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own, resumed = self._path(trainer), trainer.ckpt_path
        is_own = resumed is not None and Path(resumed).resolve() == own.resolve()
        self._counted_step = trainer.global_step
        self._is_saved = is_own or resumed is None
        if is_own and trainer.is_global_zero:
            self._point_to(own)  # a run that was killed between the two left the link to the one before

    def may_save_after_step(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint may be due once the step that is under way is over; the same on every rank."""
        step = trainer.global_step + max(1, len(trainer.optimizers))  # by hand, a step may use each
        ends = trainer.is_last_batch or 0 < trainer.max_steps <= step
        return ends or step // self.every_n_steps > self._counted_step // self.every_n_steps

    def _end_batch(self, trainer: Trainer, end: Callable[[_DataFetcher], None], data_fetcher: _DataFetcher) -> None:
        if trainer.global_step // self.every_n_steps > self._counted_step // self.every_n_steps:
            self.save(trainer)
        end(data_fetcher)

    def _end_epoch(self, trainer: Trainer, end: Callable[[], None]) -> None:
        is_whole = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if not is_whole:  # the run ends in mid-epoch; a longer one goes on in it
            self.save(trainer)
        end()
        if is_whole and self._has_saved(trainer) and _act_at_epoch_end(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this step, unless there is one already."""
        if not self._has_saved(trainer):
            self._save(trainer)

    def _has_saved(self, trainer: Trainer) -> bool:
        return self._is_saved and trainer.global_step == self._counted_step

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"step_{trainer.global_step}.ckpt"

    def _save(self, trainer: Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False):  # set past Lightning's own declaration
            return
        self._counted_step, self._is_saved = trainer.global_step, True
        path = self._path(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            # a strategy of the user's own has written it by now
            once_saved: Callable[[Callable[[], None]], None] = getattr(trainer.strategy, "once_saved", _now)
            once_saved(lambda: self._point_to(path))

    def _point_to(self, path: Path) -> None:
        try:
            try:
                self._link_to(path)
            except OSError:  # as a checkpoint's own files, it is written once more where a disk had a moment's trouble
                self._link_to(path)
        except OSError as error:
            told = describe_failure(error, rank=0)
            raise UnwrittenCheckpoint(f"last.ckpt could not be made to point to {path.name}: {told}") from error
        for old in self._outdated(path):
            self._removed.add(old)  # or one that can't be removed would be reported at each save
            directory.remove(old)

    def _link_to(self, path: Path) -> None:
        beside = directory.vacant(self.folder / "last.ckpt.partial")
        try:
            beside.symlink_to(path.name)
            directory.put(beside, self.folder / "last.ckpt")
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    def _outdated(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove: those of an earlier start too, but none ahead of this one's newest."""
        newest_step = _step(newest)
        assert newest_step is not None
        steps = {path: step for path in self.folder.iterdir() if (step := _step(path)) is not None}
        older = sorted((path for path, step in steps.items() if step <= newest_step), key=lambda path: steps[path])
        every = self.keep_every_n_steps or newest_step + 1
        return [path for path in older[: -self.keep] if steps[path] % every and path not in self._removed]


def _step(path: Path) -> int | None:
    """Return the step of a checkpoint of the engine by its name; None for anything else in the folder."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named and path.is_dir() and not path.is_symlink() else None


def _act_at_epoch_end(trainer: Trainer) -> bool:
    """Return whether the module, or a callback of the user's, has an `on_train_epoch_end`, which may change what is
    saved."""
    owners: tuple[LightningModule | Callback, ...] = (trainer.lightning_module, *callbacks_of(trainer))
    return any(owner.on_train_epoch_end.__module__.partition(".")[0] not in _KNOWN for owner in owners)


def _now(action: Callable[[], None]) -> None:
    action()


_WRITTEN = re.compile(r".+\.ckpt(\.previous(_\d+)?)?", re.DOTALL)
_ASKED_FOR = re.compile(r".+\.ckpt", re.DOTALL)  # written by Lightning when a scheduler asks
_NO_TENSORS = slice(0)


def newest(run_dir: Path) -> tuple[Path, Position] | None:
    """Return the checkpoint of a run that is furthest in training, and its position; None where there is none yet.

    Whether its tensors are undamaged is found where they are read, by all ranks together.

    Raises:
        UnfitCheckpoint: there are checkpoints, and none of them can be read.
    """
    readable, damaged = _found(run_dir)
    if damaged and not readable:
        raise _all_damaged(damaged)
    _warn_of(damaged)
    return readable[0] if readable else None


def best_or_last(run_dir: Path) -> Path | None:
    """Return the checkpoint that a run stands for: its best, else its last; None where it has neither yet."""
    named = (run_dir / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    return next((path for path in named if path.exists()), None)


def checkpoints_up_to(path: Path, run_dir: Path) -> list[Path]:
    """Return a checkpoint and, if it is the run's own, those before it in training: candidates to go on from."""
    readable = [own for own, _ in _found(run_dir)[0]]
    return readable[readable.index(path) :] if path in readable else [path]


def first_whole(candidates: list[Path], group: dist.ProcessGroup | None) -> Reader:
    """Return a reader of the first checkpoint that is undamaged. Collective.

    Args:
        candidates: in the order of preference.
        group: of the ranks that read together; None for one process.

    Raises:
        UnfitCheckpoint: on every rank, when all of them are damaged.
    """
    damaged: list[UnfitCheckpoint] = []
    for path in candidates:
        try:
            reader = Reader(path, group)
        except UnfitCheckpoint as error:
            damaged.append(error)
            continue
        _warn_of(damaged, instead=path)
        return reader
    raise _all_damaged(damaged)


def position_of(path: Path) -> Position | None:
    """Return a checkpoint's position in training; None for one that was not written by this engine.

    Raises:
        UnfitCheckpoint: it can't be read, as far as can be told without reading its tensors.
    """
    before = directory.identity(path)
    try:
        if is_foreign(path):
            if path.is_file() and not is_hub(path):
                read_foreign(path)
            return None
        directory.read_index(path, _NO_TENSORS)
        return saved_position(directory.read_state(path))
    except Exception as error:  # torch raises many kinds for what is no checkpoint, or a part of one
        raise unreadable(path, directory.replaced(path, before) or why(error)) from error


def _found(run_dir: Path) -> tuple[list[tuple[Path, Position]], list[UnfitCheckpoint]]:
    """Return the checkpoints of a run that can be read, the furthest first, and the errors of the others."""
    readable, damaged = [], []
    for path in [*_named(run_dir / "checkpoints", _WRITTEN), *_named(run_dir, _ASKED_FOR)]:
        try:
            if (position := position_of(path)) is not None:
                readable.append((path, position))
        except UnfitCheckpoint as error:
            damaged.append(error)
    readable.sort(key=_distance, reverse=True)
    return readable, damaged


def _distance(found: tuple[Path, Position]) -> tuple[int, bool, bool, str]:
    """Return how far a checkpoint is: of two at the same step, the one after whose validation and whose epoch's end;
    then the one that is named by its step."""
    path, position = found
    return position.global_step, not position.validation_due, not position.epoch_end_due, path.name


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the directories in a folder whose names fit, as checkpoints of the engine are; not files nor links.

    Raises:
        UnfitCheckpoint: it can't be listed. A run that has checkpoints must not start anew for that.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                folder / entry.name
                for entry in entries
                if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnfitCheckpoint(f"{shown(folder)} can't be listed: {error.strerror}") from error


@rank_zero_only
def _warn_of(damaged: list[UnfitCheckpoint], instead: Path | None = None) -> None:
    for error in damaged:
        log.warning("%s; it is passed over", error)
    if damaged and instead:
        log.info("resumes    %s", shown(instead))


def _all_damaged(damaged: list[UnfitCheckpoint]) -> UnfitCheckpoint:
    told = "; ".join(map(str, damaged))
    return UnfitCheckpoint(f"{told}; start anew with resume=never, or go on from another with resume=PATH")
