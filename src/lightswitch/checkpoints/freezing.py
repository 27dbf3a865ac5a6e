"""What a run has frozen and unfrozen, through a resume: a hook that does it once is not called again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightswitch.checkpoints import names
from lightswitch.checkpoints.finetuning import Finetuned

KEY = "frozen_since"  # of a checkpoint: whether each parameter is frozen of which that has changed since the run began


class Freezing(Callback):
    """Callback that saves which parameters are frozen or unfrozen since the run began, and does so again on a resume.

    Others stay as the module has them: a resumed run may be given one that freezes other parameters.
    """

    _at_start: Mapping[str, bool] = MappingProxyType({})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._at_start = _frozen(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        frozen = _frozen(pl_module)
        changed = {name: frozen[name] for name, before in self._at_start.items() if frozen.get(name, before) != before}
        if changed:
            checkpoint[KEY] = changed

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        frozen, saved, strategy = _frozen(pl_module), checkpoint.get(KEY, {}), trainer.strategy
        changed = [name for name, before in frozen.items() if saved.get(name, before) != before]
        if not changed or trainer.state.fn != TrainerFn.FITTING or not isinstance(strategy, Finetuned):
            return
        parameters = names.parameters(pl_module)
        with strategy.over_parameters():
            for name in changed:
                parameters[name].requires_grad_(not saved[name])


def _frozen(module: LightningModule) -> dict[str, bool]:
    return {name: not parameter.requires_grad for name, parameter in names.parameters(module).items()}
