"""What a model's runs are watched for beside what a check measures: what is frozen costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

WITNESS = (
    "+callbacks.witness._target_=tests.project.witness.Witness",
    "+callbacks.witness.folder=${hydra:runtime.output_dir}",
)


class Witness(Callback):
    """Switches dropout off, whose masks differ with the number of devices, and writes down what a rank holds."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "witness.json"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):  # as in nn.MultiheadAttention and nn.LSTM
                module.dropout = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(_held(trainer, pl_module)))


def _held(trainer: Trainer, module: nn.Module) -> dict[str, Any]:
    """What this rank holds for training: elements of the optimizer's state, and the frozen parameters with gradients.

    The elements that are trained are those of the whole model: a sharded rank has at most as many.
    """
    optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])  # DeepSpeed's has another within
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    frozen = [name for name, one in module.named_parameters() if not one.requires_grad and one.grad is not None]
    return {
        "optimizer_elements": sum(getattr(state, "to_local", lambda state=state: state)().numel() for state in states),
        "trained_elements": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained),
        "frozen_gradients": frozen,
    }
