"""The objective of a run, found among the metrics that its module logs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from lightswitch.errors import listed, nearest

LOSS = "val/loss"
_VALIDATION = re.compile(r"^(validation|valid|val|eval|dev)(?=[^a-z])")
_OF_LOADER = re.compile(r"/dataloader_idx_\d+$")
_FALLS = (
    r"loss|error|perplexity|distance|divergence|negative|(?<![a-z])(err|mae|mape|smape|mse|msle|rmse|nll|ppl|brier|crps|"
    r"ece|fid|kid|lpips|wer|cer|mer|ter)(?![a-z])"
)
_GROWS = (
    r"acc|auc|auroc|auprc|bleu|correlation|dice|elbo|f1|iou|jaccard|kappa|map(?!e)|mcc|mrr|ndcg|pearson|precision|psnr|r2|"
    r"recall|reward|rouge|similarity|spearman|ssim|success|top\d"
)
_GROWS_ALONE = "score"  # says nothing of its own: brier_score, fid_score


def find(names: Iterable[str], wanted: str | None) -> str | None:
    """Return the metric that matches `wanted`: `val/loss` also matches `val_loss` and `validation_loss`; None if none.

    Of a metric that several loaders log, as `val/loss/dataloader_idx_0` and so on, the name without an index matches
    that of the first loader.

    Args:
        wanted: the metric in any spelling; None for the validation loss, or else for the only validation metric.
    """
    names = sorted(names, reverse=True)  # of names that are spelt alike, the last counts: the first loader's
    exact = {_plain(name): name for name in names}
    spelt = {_plain(of_all_loaders(name)): name for name in names}
    if wanted is not None and (found := exact.get(_plain(wanted))):
        return found
    if found := spelt.get(_plain(wanted or LOSS)):
        return found
    of_validation = [name for plain, name in spelt.items() if plain.startswith("val/")]
    return of_validation[0] if wanted is None and len(of_validation) == 1 else None


def mode(name: str) -> Literal["min", "max"]:
    """Return, by a metric's name, whether its lowest or its highest value is the best: the lowest for unknown names.

    The last word that tells decides, as in error_recall.
    """
    plain = _plain(name)
    told = list(re.finditer(f"(?P<min>{_FALLS})|(?P<max>{_GROWS})", plain))
    if told and "loss" not in plain:
        return "min" if told[-1].lastgroup == "min" else "max"
    return "max" if not told and _GROWS_ALONE in plain else "min"


def of_all_loaders(name: str) -> str:
    """Return a metric's name without the index of its loader, which Lightning appends if there are several."""
    return _OF_LOADER.sub("", name)


def absent(wanted: str, names: Iterable[str]) -> str:
    """Return the message about a requested metric that the run has not logged."""
    logged = of_module(names)
    found = f"the run has logged {listed(logged, 'metrics', shown=8)}" if logged else "the run has logged no metric"
    return f"monitor={wanted}: {found}.{nearest(wanted, logged)}"


def of_module(names: Iterable[str]) -> list[str]:
    """Return the metrics' names sorted, without the learning rates of LearningRateMonitor, such as `lr-AdamW`."""
    return sorted(name for name in names if not name.startswith("lr-"))


def _plain(name: str) -> str:
    return re.sub(r"[/_.\-\s]+", "/", _VALIDATION.sub("val", name.lower()))
