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
from lightswitch.launch.range_test import RangeTest, initial_rates
from lightswitch.lightning_types import callbacks_of
from lightswitch.mixins import Mixin, with_mixin
from lightswitch.strategies.kernels import fuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import functools
from dataclasses import dataclass

from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

log = logging.getLogger(__name__)

_KEY = "found_learning_rate"  # of a checkpoint
_FEWEST_STEPS = 13  # Lightning leaves out the first ten losses and the last, and needs two for a slope
_DIGITS = 4  # of the rate that is taken, so that it can be typed
_NAMES = ("lr", "learning_rate")  # Lightning's


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


@dataclass(frozen=True)
class LearningRate:
    """An attribute or a hyperparameter of a module, which `configure_optimizers` reads.

    Attributes:
        name: of a number, or of a partial of an optimizer's class, as templates keep it.
    """

    module: LightningModule
    name: str

    @property
    def value(self) -> float:
        kept: Any = lightning_getattr(self.module, self.name)
        return float(kept.keywords["lr"] if isinstance(kept, functools.partial) else kept)

    def set(self, value: float) -> None:
        """Let the next `configure_optimizers` take another rate."""
        kept = lightning_getattr(self.module, self.name)
        if isinstance(kept, functools.partial):
            kept = functools.partial(kept.func, *kept.args, **{**kept.keywords, "lr": value})
        else:
            kept = value
        lightning_setattr(self.module, self.name, kept)


def learning_rate_of(module: LightningModule, name: str = "") -> LearningRate:
    """Return the learning rate of a module.

    Args:
        name: of the attribute; empty to look for `lr`, `learning_rate`, or a partial that has an `lr`.

    Raises:
        Refused: the module has none of them.
    """
    for candidate in (name,) if name else (*_NAMES, *_partials(module)):
        if lightning_hasattr(module, candidate) and _is_rate(lightning_getattr(module, candidate)):
            return LearningRate(module, candidate)
    found = f"no learning rate in {name}" if name else "no lr, learning_rate, or partial of an optimizer with an lr"
    raise Refused(
        f"LearningRateFinder: {type(module).__name__} has {found}; let configure_optimizers read self.hparams.lr, or "
        "type the callback's attr_name=NAME"
    )


def _partials(module: LightningModule) -> Iterator[str]:
    for kept in (vars(module), module.hparams):
        yield from (str(name) for name, value in kept.items() if isinstance(value, functools.partial))


def _is_rate(value: object) -> bool:
    rate = value.keywords.get("lr") if isinstance(value, functools.partial) else value
    return isinstance(rate, int | float) and not isinstance(rate, bool)
