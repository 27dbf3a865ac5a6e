"""The learning rate that a module's optimizer is made with, wherever the module keeps it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from lightswitch.errors import Refused

_NAMES = ("lr", "learning_rate")  # Lightning's


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
