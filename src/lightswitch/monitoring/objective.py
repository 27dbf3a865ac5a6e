"""The objective of a run, found among the metrics that its module logs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from lightswitch.errors import listed, nearest

LOSS = "val/loss"
_VALIDATION = re.compile(r"^(validation|valid|val|eval|dev)(?=[^a-z])")
_GROWS = re.compile(r"acc|auc|auroc|bleu|dice|f1|iou|map|precision|psnr|r2|recall|rouge|score|ssim|top\d")


def find(names: Iterable[str], wanted: str | None) -> str | None:
    """Return the metric that is meant: `val/loss` is `val_loss` and `validation_loss`, too; None if there is none.

    Args:
        wanted: by any spelling; None for the validation loss, or for the one metric of validation that there is.
    """
    spelt = {_plain(name): name for name in names}
    if found := spelt.get(_plain(wanted or LOSS)):
        return found
    of_validation = [name for plain, name in spelt.items() if plain.startswith("val/")]
    return of_validation[0] if wanted is None and len(of_validation) == 1 else None


def mode(name: str) -> Literal["min", "max"]:
    """Return whether the lowest or the highest value of a metric is the best, by its name: the lowest, unless known."""
    return "max" if _GROWS.search(_plain(name)) and "loss" not in name.lower() else "min"


def absent(wanted: str, names: Iterable[str]) -> str:
    """Return the message about a metric that was asked for and is not logged."""
    logged = of_module(names)
    found = f"the run has logged {listed(logged, 'metrics', shown=8)}" if logged else "the run has logged no metric"
    return f"monitor={wanted}: {found}.{nearest(wanted, logged)}"


def of_module(names: Iterable[str]) -> list[str]:
    """Return metrics in order, without the learning rates that LearningRateMonitor puts beside them: `lr-AdamW`."""
    return sorted(name for name in names if not name.startswith("lr-"))


def _plain(name: str) -> str:
    return re.sub(r"[/_.\-\s]+", "/", _VALIDATION.sub("val", name.lower()))
