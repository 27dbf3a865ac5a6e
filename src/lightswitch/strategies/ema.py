"""Averages of weights under every strategy: an average is elementwise, so each rank averages its own shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightswitch.checkpoints import names
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored, local, with_local
from lightswitch.errors import Refused

STATE = "averaging_state"  # the key of Lightning's WeightAveraging in a checkpoint whose model is an average
_IN_16_BITS = (torch.float16, torch.bfloat16)  # in which the small steps of an average would be lost


class EMA(Callback):
    """Exponential moving average of the weights, which is validated, tested and exported in place of the weights.

    Each rank averages its own shards, in 32 bits or more. A checkpoint's model is the average; the trained weights are
    beside it, and a resumed run goes on with both.

    Args:
        decay: share of the average that an update keeps; None for the mean of the weights at all updates (SWA).
        update_every_n_steps: optimizer steps from one update to the next.
        update_starting_at_step: index of the first step after which it is updated; until then, it is the initial
            weights, and the first update replaces them.
        use_buffers: average the buffers, such as a batch norm's statistics, too.
        device: where the average is stored; None for the device of the weights.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        use_buffers: bool = True,
        device: str | None = None,
    ) -> None:
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.use_buffers = use_buffers
        self.device = device
        self._averages: dict[str, Tensor] = {}  # this rank's shards, by name; empty outside of a fit
        self._trained: dict[str, Tensor] = {}  # while the module holds the averages: the weights that are trained
        self._updates = self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the module's weights, which the strategy has sharded."""
        self._updates, self._step, self._trained, self._averages = 0, trainer.global_step, {}, {}
        for name, stored in self._live(pl_module).items():
            weight = local(stored)
            dtype = torch.float32 if weight.dtype in _IN_16_BITS else weight.dtype
            self._averages[name] = weight.to(self.device or weight.device, dtype, copy=True)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:  # between micro-batches
            return
        self._step = trainer.global_step
        index = self._step - 1
        if index < self.update_starting_at_step or index % self.update_every_n_steps:
            return
        kept = 1 - 1 / (self._updates + 1) if self.decay is None or self._updates == 0 else self.decay
        for name, stored in self._live(pl_module).items():
            average, weight = self._averages[name], local(stored).to(self._averages[name])
            if average.is_floating_point() or average.is_complex():
                average.lerp_(weight, 1 - kept)
            else:
                average.copy_(weight)
        self._updates += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the module hold the averages, or, if it does, the trained weights again. Collective."""
        if not self._averages:
            return
        # in Lightning's inference mode, a strategy would gather tensors that can't be trained
        with torch.inference_mode(False), torch.no_grad():
            live = {name: local(stored) for name, stored in self._live(pl_module).items()}
            values = self._trained or self._averages
            self._trained = {} if self._trained else {name: weight.clone() for name, weight in live.items()}
            for name, weight in live.items():
                weight.copy_(values[name])
            _strategy(pl_module).parameters_changed()

    on_validation_epoch_start = on_validation_epoch_end = on_train_end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._averages:
            return
        saved, live = checkpoint["state_dict"], self._live(pl_module)
        checkpoint["state_dict"] = {**saved, **_like(live, self._averages, saved)}
        checkpoint["current_model_state"] = {**saved, **_like(live, self._trained, saved)}
        checkpoint[STATE] = {"n_averaged": torch.tensor(self._updates)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Read averages and trained weights; if the checkpoint has no averages, start them from its weights."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        with torch.no_grad():
            self.on_fit_start(trainer, pl_module)
            self._step = checkpoint["global_step"]
            if STATE in checkpoint:
                strategy, live = _strategy(pl_module), self._live(pl_module)
                strategy.read("model", _like(live, self._averages, live))
                strategy.read("trained", live)
                strategy.parameters_changed()
                self._updates = int(checkpoint[STATE]["n_averaged"])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._averages, self._trained = {}, {}

    def _live(self, module: LightningModule) -> dict[str, Stored]:
        """Return this rank's shard of each parameter, and the buffers, by name."""
        buffers = {names.own_name(name): one for name, one in module.named_buffers()} if self.use_buffers else {}
        return {**_strategy(module).local_parameters(), **buffers}


def _like(live: Mapping[str, Stored], values: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the values whose names are wanted, sharded like the weights of their names."""
    return {name: with_local(live[name], value) for name, value in values.items() if name in wanted}


def _strategy(module: LightningModule) -> PortableCheckpoints:
    strategy = module.trainer.strategy
    if not isinstance(strategy, PortableCheckpoints):
        raise Refused(f"callbacks.ema: {type(strategy).__name__} has no shards to average; use strategy=ddp or fsdp")
    return strategy
