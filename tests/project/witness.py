"""What a training step does that would make its curve depend on the number of devices, or on a restart."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torchmetrics import Metric

from lightswitch.checking.causes import REMEDIES
from lightswitch.checking.probe import batch_norms, generators

WITNESS = (
    "+callbacks.witness._target_=tests.project.witness.Witness",
    "+callbacks.witness.folder=${hydra:runtime.output_dir}",
)


class Witness(Callback):
    """Switches dropout off, whose masks differ with the number of devices, and writes down what else would."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder) / "witness.json"
        self.draws: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):  # as in nn.MultiheadAttention and nn.LSTM
                module.dropout = 0.0
        self.before = dict(_kept(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.states = generators(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.draws |= {name for name, state in generators(pl_module.device).items() if state != self.states[name]}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            after = dict(_kept(pl_module))
            changed = sorted(name for name, digest in after.items() if self.before.get(name) != digest)
            found = {"batch_norms": batch_norms(pl_module), "draws": sorted(self.draws), "keeps": changed}
            self.file.write_text(json.dumps(found | _held(trainer, pl_module)))


def causes(run_dir: Path) -> dict[str, str]:
    """What was seen of a run whose curve may depend on the number of devices or on a restart, by the kind of cause."""
    found = json.loads((run_dir / "witness.json").read_text())
    seen = {
        "batch norm": found["batch_norms"],
        "noise by rank": found["draws"],
        "state in Python objects": found["keeps"],
    }
    return {cause: f"{_named(names)}: {cause}; {REMEDIES[cause]}" for cause, names in seen.items() if names}


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


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


def _kept(module: LightningModule) -> Iterator[tuple[str, str]]:
    """Names and digests of what the modules hold beside parameters, buffers and modules."""
    usual = vars(LightningModule()).keys() | {"training", "_hparams", "_hparams_initial", "_hparams_name"}
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        for name, value in vars(part).items():
            if name not in usual and not isinstance(value, nn.Module):
                try:
                    yield f"{path}.{name}".lstrip("."), _digest(value)
                except Exception:  # a function, a file, a generator: nothing to compare
                    continue


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()
