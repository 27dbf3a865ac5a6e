"""The checkpoints for resuming a run: the callback that saves them, and the search for the newest readable one."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_only

from lightswitch.batches.plan import Position, saved_position
from lightswitch.checkpoints import directory
from lightswitch.checkpoints.ranks import describe_failure
from lightswitch.checkpoints.reader import Reader, is_foreign, is_hub, read_foreign, unreadable, why
from lightswitch.errors import UnfitCheckpoint, UnwrittenCheckpoint, shown
from lightswitch.regular_files import linked

log = logging.getLogger(__name__)


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
        self._counted_step = 0  # start of the current interval: the step of the last save, or of the start
        self._is_saved = True  # whether this folder has the checkpoint of that step
        self._removed: set[Path] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own, resumed = self._path(trainer), linked(Path(trainer.ckpt_path)) if trainer.ckpt_path is not None else None
        is_own = resumed is not None and resumed.resolve() == own.resolve()
        # of this step another checkpoint of the run was written, such as the best, before it was killed
        is_due = not is_own and resumed is not None and resumed.resolve().parent == self.folder.resolve()
        self._counted_step = trainer.global_step - is_due
        self._is_saved = is_own or resumed is None
        if is_own and trainer.is_global_zero:
            self._point_to(own)  # a run killed between saving and linking left last.ckpt at the previous checkpoint

    def save_if_due(self, trainer: Trainer) -> None:
        """Save a checkpoint if the interval is over; called between steps."""
        if trainer.global_step // self.every_n_steps > self._counted_step // self.every_n_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this step, unless it is already saved."""
        is_saved = self._is_saved and trainer.global_step == self._counted_step
        if is_saved or getattr(trainer, "fast_dev_run", False):  # an attribute that Lightning does not declare
            return
        self._counted_step, self._is_saved = trainer.global_step, True
        path = self._path(trainer)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            # without `once_saved`, as in a strategy of the user, the checkpoint is already written
            once_saved = getattr(trainer.strategy, "once_saved", lambda action: action())
            once_saved(lambda: self._point_to(path))

    def _path(self, trainer: Trainer) -> Path:
        return self.folder / f"step_{trainer.global_step}.ckpt"

    def _point_to(self, path: Path) -> None:
        try:
            try:
                directory.link(self.folder / "last.ckpt", path.name)
            except OSError:  # retried once, as a checkpoint's files are, in case the disk error was transient
                directory.link(self.folder / "last.ckpt", path.name)
        except OSError as error:
            message = describe_failure(error, rank=0)
            raise UnwrittenCheckpoint(f"last.ckpt could not be made to point to {path.name}: {message}") from error
        for old in self._outdated(path):
            self._removed.add(old)  # otherwise a checkpoint that can't be removed would be reported at each save
            directory.remove(old)

    def _outdated(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove, including those of earlier starts, but none after the step of `newest`."""
        newest_step = _step(newest)
        assert newest_step is not None
        steps = {path: step for path in self.folder.iterdir() if (step := _step(path)) is not None}
        older = sorted((path for path, step in steps.items() if step <= newest_step), key=lambda path: steps[path])
        every = self.keep_every_n_steps or newest_step + 1
        return [path for path in older[: -self.keep] if steps[path] % every and path not in self._removed]


def _step(path: Path) -> int | None:
    """Return the step in the name of one of these checkpoints; None for anything else in the folder."""
    named = _NAME.fullmatch(path.name)
    return int(named[1]) if named and path.is_dir() and not path.is_symlink() else None


_WRITTEN = re.compile(r".+\.ckpt(\.previous(_\d+)?)?", re.DOTALL)
_ASKED_FOR = re.compile(r".+\.ckpt", re.DOTALL)  # hpc_ckpt_1.ckpt: Lightning's, on a scheduler's signal
_NO_TENSORS = slice(0)


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


def is_up_to(path: Path, position: Position | None) -> bool:
    """Return whether a checkpoint is there and was saved no later in training than a position, if it has one."""
    try:
        found = position_of(path if path.exists() else directory.previous(path))
    except UnfitCheckpoint:
        return False
    return found is None or position is None or found.global_step <= position.global_step


def first_whole(candidates: list[Path], group: dist.ProcessGroup | None) -> Reader:
    """Return a reader of the first undamaged checkpoint. Collective.

    Args:
        candidates: in the order of preference.
        group: the process group of the ranks that read together; None for a single process.

    Raises:
        UnfitCheckpoint: on every rank, if all of them are damaged.
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
    """Return a checkpoint's position in training; None if the engine has not written it.

    Raises:
        UnfitCheckpoint: it can't be read. Its tensors are not checked.
    """
    path = linked(path)
    before = directory.identity(path)
    try:
        if is_foreign(path):
            if path.is_file() and not is_hub(path):
                read_foreign(path)
            return None
        directory.read_index(path, _NO_TENSORS)
        return saved_position(directory.read_state(path))
    except Exception as error:  # torch raises many kinds of errors for a file that is not a checkpoint, or truncated
        raise unreadable(path, directory.replaced(path, before) or why(error)) from error


def _found(run_dir: Path) -> tuple[list[tuple[Path, Position]], list[UnfitCheckpoint]]:
    """Return the readable checkpoints of a run, the furthest in training first, and the errors of the others."""
    readable, damaged = [], []
    for path in [*_named(run_dir / "checkpoints", _WRITTEN), *_named(run_dir, _ASKED_FOR)]:
        try:
            if (position := position_of(path)) is not None:
                readable.append((path, position))
        except UnfitCheckpoint as error:
            damaged.append(error)
    readable.sort(key=_distance, reverse=True)
    return readable, damaged


def _distance(found: tuple[Path, Position]) -> tuple[int, bool, str]:
    """Return a sort key for a checkpoint's progress: its step, then its name, so that of equal ones `step_<n>.ckpt` is
    the furthest."""
    path, position = found
    return position.global_step, not position.lacks_ending, path.name


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the directories in a folder whose names match, without files and links.

    Raises:
        UnfitCheckpoint: the folder can't be listed. A run that has checkpoints must not start anew for that reason.
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
        log.warning("%s; skipping it", error)
    if damaged and instead:
        log.info("resumes    %s", shown(instead))


def _all_damaged(damaged: list[UnfitCheckpoint]) -> UnfitCheckpoint:
    message = "; ".join(map(str, damaged))
    return UnfitCheckpoint(f"{message}; start over with resume=never, or resume another one with resume=PATH")
