"""Time for which a checkpoint stops training, against a copy of the same state in memory and Lightning's own save.

python -m benchmarks.save
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.results import Row, interleaved, options, publish, row
from lightswitch.strategies.ddp import Single


class Linears(LightningModule):
    """Linear layers of width × width parameters, of which Adam holds two more copies."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(1, self.width))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Saving(Callback):
    """Callback that measures saves after a training step, in wall time, because training also waits for disks."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.seconds: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        state = list(_state(trainer))
        copies = [torch.empty_like(tensor) for tensor in state]

        def ours() -> float:
            held_up = _seconds(lambda: trainer.save_checkpoint(self.folder / "ours.ckpt"))
            trainer.strategy._writer.wait()  # written in the background; training waits for it here
            return held_up

        def copy() -> float:
            return _seconds(lambda: [to.copy_(tensor) for to, tensor in zip(copies, state, strict=True)])

        def lightnings() -> float:
            return _seconds(lambda: _save_as_lightning(trainer, self.folder / "lightnings.ckpt"))

        contenders = {"a save": ours, "a copy in memory": copy, "Lightning's save": lightnings}
        interleaved(contenders, 1)  # allocates buffers that are reused, and touches the copies
        self.seconds = interleaved(contenders, self.rounds)


def main() -> None:
    given = options("save", __doc__ or "")
    saving = measured(
        layers=2 if given.quick else 20, width=200 if given.quick else 2048, rounds=2 if given.quick else 7
    )
    publish(rows(saving), given, per="a checkpoint")


def measured(layers: int, width: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        saving = Saving(Path(folder), rounds)
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(
            accelerator="cpu", strategy=Single(), max_steps=1, callbacks=[saving], enable_checkpointing=False, **quiet
        )
        trainer.fit(Linears(layers, width))
    return saving.seconds


def rows(seconds: dict[str, list[float]]) -> list[Row]:
    return [
        row("a save", "a copy in memory", seconds, "≤ 1.5"),
        row("a save", "Lightning's save", seconds, "≤ 0.10"),
    ]


def _state(trainer: Trainer) -> list[Tensor]:
    states = [values for optimizer in trainer.optimizers for values in optimizer.state.values()]
    weights = list(trainer.lightning_module.state_dict().values())
    return weights + [value for values in states for value in values.values() if isinstance(value, Tensor)]


def _save_as_lightning(trainer: Trainer, path: Path) -> None:
    """Save as Lightning's `Strategy.save_checkpoint` does unless it is overridden."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoint["state_dict"] = trainer.lightning_module.state_dict()
    checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
    trainer.strategy.checkpoint_io.save_checkpoint(checkpoint, path)


def _seconds(action: Any) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
