"""What a model's runs are watched for beside what a check measures: what is frozen costs nothing."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

WITNESS = ("+callbacks.witness._target_=tests.project.witness.Witness",)


class Witness(Callback):
    """Switches dropout off, whose masks differ with the number of devices, and fails if frozen weights cost memory."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):  # as in nn.MultiheadAttention and nn.LSTM
                module.dropout = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A rank has no gradient of a frozen parameter, and at most Adam's two averages of all that is trained."""
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])  # DeepSpeed's has another within
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in states if one.ndim)
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        assert held <= 2 * elements + 64, f"the optimizer holds {held} elements for {elements} trained ones"  # padding
        frozen = [name for name, one in pl_module.named_parameters() if not one.requires_grad and one.grad is not None]
        assert not frozen, f"frozen parameters have gradients: {frozen}"
