"""Lightning's LearningRateFinder, which finds the same rate under each strategy, once in a run."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner.lr_finder import _LRFinder

from lightswitch import figures
from lightswitch.batches.callback import GlobalBatch
from lightswitch.errors import Refused, shown
from lightswitch.launch.learning_rate import LearningRate, learning_rate_of
from lightswitch.launch.range_test import RangeTest, initial_rates
from lightswitch.lightning_types import callbacks_of
from lightswitch.mixins import Mixin, with_mixin
from lightswitch.strategies.kernels import fuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_KEY = "found_learning_rate"  # of a checkpoint
_FEWEST_STEPS = 13  # Lightning leaves out the first ten losses and the last, and needs two for a slope
_DIGITS = 4  # of the rate that is taken, so that it can be typed


class RateFinder(Callback):
    """Callback that does the work of each LearningRateFinder before a run's first step.

    Lightning's own would go by the loss of rank 0's micro batch, and leave the run's schedule at the rate before.

    Args:
        batch: how the run cuts its batches.
        others: callbacks that have to see the test's batches.
        folder: for the losses, and their picture.
    """

    def __init__(self, batch: GlobalBatch, others: list[Callback], folder: Path) -> None:
        self._batch = batch
        self._others = others
        self._folder = folder
        self._found: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = callbacks_of(trainer)
        for index, finder in enumerate(callbacks):
            if isinstance(finder, LearningRateFinder):
                callbacks[index] = shared = with_mixin(_SharedFinder, finder)
                shared.find = self._find

    def _find(self, finder: _SharedFinder, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fit_loop.epoch_progress.current.ready:
            raise Refused(
                f"{type(finder).__name__}: a rate is found before a run's first step alone, and lr_find is called in "
                f"epoch {trainer.current_epoch}; start a run from these weights, with init_from=PATH"
            )
        if trainer.ckpt_path is not None:
            if trainer.is_global_zero:
                log.info("rate       is looked for before a run's first step alone; this one goes on with its own")
            return
        rate, before = learning_rate_of(pl_module, finder._attr_name), initial_rates(trainer)
        result = self._tested(finder, trainer, pl_module)
        finder.optimal_lr = result
        found, given = _suggested(finder, result, trainer), rate.value
        if finder._update_attr:
            rate.set(found)
        _make_optimizers(trainer)
        if rate.value != given and initial_rates(trainer) == before:
            raise Refused(
                f"{type(finder).__name__}: configure_optimizers of {type(pl_module).__name__} does not follow "
                f"{rate.name}; type the callback's attr_name=NAME of what it reads"
            )
        self._found = {"name": rate.name, "value": rate.value}
        if trainer.is_global_zero:
            path = _written(self._folder, result.results["lr"], result.results["loss"], found)
            then = (
                f"takes the place of {given:g}"
                if finder._update_attr
                else f"the run keeps {given:g}, as it is asked to"
            )
            log.info("rate       %g is found, and %s: %s", found, then, shown(path))

    def _tested(self, finder: LearningRateFinder, trainer: Trainer, pl_module: LightningModule) -> _LRFinder:
        low, high, steps = finder._min_lr, finder._max_lr, finder._num_training_steps
        if trainer.is_global_zero:
            log.info("rate       is looked for in %d steps, from %g to %g", steps, low, high)
        rates = rising(low, high, steps, finder._mode)
        test = RangeTest(self._batch, rates, finder._early_stop_threshold)
        test.run(trainer, pl_module, self._batch, self._others)
        result = _LRFinder(finder._mode, low, high, steps)
        result.results.update({"lr": rates[: len(test.losses)], "loss": test.losses})
        return result

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._found:
            checkpoint[_KEY] = dict(self._found)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if found := checkpoint.get(_KEY):  # the optimizer has it from its state
            self._found = found
            LearningRate(pl_module, found["name"]).set(found["value"])


class _SharedFinder(Mixin, LearningRateFinder):
    """A finder of any class that finds the same rate at any world size.

    Attributes:
        find: returns once the rate is found, and set where the finder is to set it.
    """

    find: Callable[[_SharedFinder, Trainer, LightningModule], None]

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.find(self, trainer, pl_module)


def refused(callbacks: Sequence[Callback], module: LightningModule) -> Iterator[str]:
    """Yield that a module keeps no learning rate which a finder among callbacks could set."""
    for finder in callbacks:
        if isinstance(finder, LearningRateFinder):
            try:
                learning_rate_of(module, finder._attr_name)
            except Refused as refusal:
                yield str(refusal)


def rising(low: float, high: float, steps: int, mode: str) -> list[float]:
    """Return the rates of Lightning's finder: from low on, evenly, or evenly in their logarithms, up to high."""
    shares = [0.0, *((step + 1) / steps for step in range(1, steps))]
    if mode == "linear":
        return [low + share * (high - low) for share in shares]
    return [low * (high / low) ** share for share in shares]


def _suggested(finder: LearningRateFinder, result: _LRFinder, trainer: Trainer) -> float:
    """Return the rate at which the loss falls most steeply, as Lightning finds it, with few enough digits to type.

    Raises:
        Refused: there are too few losses.
    """
    steps = len(result.results["loss"])
    suggested = trainer.strategy.broadcast(result.suggestion() if steps >= _FEWEST_STEPS else None)
    if suggested is None:
        raise Refused(
            f"{type(finder).__name__}: no rate is found in {steps} steps, of which Lightning leaves out ten; type its "
            "num_training_steps, max_lr or early_stop_threshold"
        )
    return float(f"{suggested:.{_DIGITS}g}")


def _make_optimizers(trainer: Trainer) -> None:
    """Make optimizers and schedules as if the run began: they know the rate from their constructors."""
    trainer.strategy.setup_optimizers(trainer)
    for optimizer in trainer.optimizers:
        fuse(optimizer)


def _written(folder: Path, rates: Sequence[float], losses: Sequence[float], found: float) -> Path:
    """Write the losses as a table and, where matplotlib is installed, as a picture; return the file to look at."""
    table = folder / "lr_finder.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("lr", "loss"), *zip(rates, losses, strict=True)])
    if figures.missing():
        return table
    title, description = "Loss by learning rate", f"The loss falls most steeply at {found:g}."
    drawn = figures.picture(partial(_draw, rates, losses, found), 6.5, 3.6, title, description)
    return drawn.save(folder / "lr_finder.svg")[0]


def _draw(rates: Sequence[float], losses: Sequence[float], found: float, figure: Figure, theme: figures.Theme) -> None:
    axes = figure.subplots()
    axes.plot(rates, losses)
    axes.axvline(found, color=theme.colors[1], linestyle="--")
    axes.annotate(f" {found:g}", (found, max(losses)), color=theme.ink)
    axes.set_xscale("log")
    axes.set(xlabel="learning rate", ylabel="loss, smoothed", title="Loss by learning rate")
