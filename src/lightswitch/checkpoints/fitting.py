"""Weights of other code, brought under the names of a model, and a report of what fits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightswitch.errors import Refused, listed

log = logging.getLogger(__name__)


def fitted(
    path: Path, found: Mapping[str, Tensor], model: nn.Module, live: Iterable[str], renamed: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return those of the weights that the model has a name for, by that name, and log what fits and what does not.

    Names are brought to the model's by its own method ``from_hf(weights)``, if it has one and none is its own already.

    Args:
        path: of the weights, for messages.
        live: names of the model's parameters and buffers.
        renamed: how names in the file begin, and how the model's do instead.

    Raises:
        Refused: none of them fits.
    """
    wanted = set(live)
    weights = {_renamed(name, renamed): value for name, value in found.items()}
    translate = getattr(model, "from_hf", None)
    if translate is not None and not wanted & weights.keys():
        weights = dict(translate(weights))
    fits = {name: value for name, value in weights.items() if name in wanted}
    if not fits:
        raise Refused(
            f"init_from={path}: none of its {len(found)} tensors has a name of the model's; it has "
            f"{listed(sorted(found))}, the model {listed(sorted(wanted))}; "
            "say how names begin there and here: 'init_names={old.: new.}'"
        )
    _tell(path, wanted, weights.keys(), fits.keys())
    return fits


@rank_zero_only
def _tell(path: Path, wanted: Set[str], found: Set[str], fits: Set[str]) -> None:
    log.info("init_from  %d of the model's %d tensors are in %s", len(fits), len(wanted), path)
    if kept := sorted(wanted - fits):
        log.warning("init_from  %s keep the values they were built with", listed(kept))
    if unused := sorted(found - fits):
        log.warning("init_from  %s of %s are not the model's", listed(unused), path)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
