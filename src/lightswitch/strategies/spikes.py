"""Lightning's SpikeDetection in runs that are resumed and end in a line.

Its own class fails to read the state that it saves, and raises what a job would be started again for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import SpikeDetection
from torch import Tensor

from lightswitch import patches
from lightswitch.errors import LossSpike
from lightswitch.mixins import Mixin, mixed_class

_RECENT = "recent_losses"


def resume_spikes(callbacks: Iterable[Callback]) -> None:
    """Have each SpikeDetection go on where it stood, with the limits that are typed."""
    for callback in callbacks:
        if isinstance(callback, SpikeDetection) and not isinstance(callback, _ResumedSpikes):
            patches.replace(callback, "__class__", mixed_class(_ResumedSpikes, type(callback)))


class _ResumedSpikes(Mixin, SpikeDetection):
    _recent_losses: tuple[float, ...] = ()  # of the window, the oldest first

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.running_mean.to(trainer.strategy.root_device)  # Lightning moves it in an epoch's first batch alone

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:  # type: ignore[override]  # of its two bases
        """Look at a batch's loss.

        Raises:
            LossSpike: on every rank, where the loss of one has jumped.
        """
        try:
            super().on_train_batch_end(trainer, *others)
        except TrainingSpikeException as error:
            raise LossSpike(
                f"the loss has a spike by step {trainer.global_step}: {self.exclude_batches_path} has its batch and "
                "the one before; lower the learning rate, or raise rtol or atol of the SpikeDetection"
            ) from error

    def _update_stats(self, val: Tensor) -> None:
        super()._update_stats(val)
        self._recent_losses = (*self._recent_losses, val.item())[-self.running_mean.window :]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _RECENT: list(self._recent_losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the losses; limits and the path to write to are this run's, and not those of a checkpoint."""
        self.last_val = state_dict["last_val"]
        self.bad_batches = list(state_dict["bad_batches"])
        self._recent_losses = tuple(state_dict.get(_RECENT, ()))
        self.running_mean.reset()
        for loss in self._recent_losses:
            self.running_mean.update(loss)
