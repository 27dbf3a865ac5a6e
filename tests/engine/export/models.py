"""Models whose weights are hard to take out, and what the live ones answer."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.engine.models.language import LanguageModel
from tests.engine.plain import PlainModel


class LogitsModel(PlainModel):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


class Tied(LogitsModel):
    """Two names for one parameter, a module compiled inside, a table that is not saved, a buffer of integers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), Recurrent(width), nn.Linear(width, 4))
        self.net[2].back.weight = self.net[2].there.weight
        self.net = torch.compile(self.net, backend="eager")


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.there = nn.Linear(width, width, bias=False)
        self.back = nn.Linear(width, width, bias=False)
        self.register_buffer("angles", torch.linspace(0, 1, width).cos(), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.back(self.there(x) * self.angles)


class Versioned(LogitsModel):
    """Keeps what is no tensor."""

    version = 1

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"] + 1


class Configured(LogitsModel):
    """Built in `configure_model`, as large models are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(2, self.hparams.width), nn.Tanh(), nn.Linear(self.hparams.width, 4))


def question(model: nn.Module) -> Tensor:
    if isinstance(model, LanguageModel):
        return torch.arange(64).view(2, 32)
    return torch.linspace(-1, 1, 16).view(8, 2)


class Answer(pl.Callback):
    """Writes the logits of the trained model, which are those of its last checkpoint."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "logits.pt"

    @torch.no_grad()
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.eval()
        logits = trainer.strategy.predict_step(question(module), 0)  # as the strategy calls it: it may have to gather
        module.train()
        if trainer.is_global_zero:
            torch.save(logits, self.path)
