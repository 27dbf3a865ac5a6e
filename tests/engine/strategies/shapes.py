"""LightningModules of every make that people train, as small as they get. They know nothing of the engine."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightswitch.strategies.ema import EMA

WORDS, WIDTH = 12, 16
Batch = tuple[Tensor, Tensor]


class Sentences(pl.LightningDataModule):
    """Five words, and the class that the first two of them make."""

    def __init__(self, samples: int = 64) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> DataLoader:
        return DataLoader(sentences(self.samples, seed=1), batch_size=4, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(sentences(13, seed=2), batch_size=4)


def sentences(count: int, seed: int) -> TensorDataset:
    words = torch.randint(WORDS, (count, 5), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words[:, 0] + words[:, 1]) % WORDS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Of words (batch, 5) to logits (batch, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words).flatten(1)[:, : 2 * WIDTH].unflatten(1, (2, WIDTH)).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test/loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01, eps=1e-5)


class TiedBlocks(Plain):
    """One weight in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].up.weight = self.net.blocks[0].up.weight


class Buffers(Plain):
    """Of every kind, two of which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WORDS) + 0.5)
        self.register_buffer("shift", torch.linspace(-1, 1, WORDS), persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones(WORDS), torch.rand(WORDS)))
        self.register_buffer("kept", torch.arange(WORDS) % 5 > 0)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", None)

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * self.scale * self.turn.real * self.kept + self.shift

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.steps.fill_(self.global_step)
        self.halves = self.halves + 0.0 * self.steps
        return super().training_step(batch, batch_idx) + 0.01 * self.steps


class BranchOfUnits(Plain):
    """A whole block of it has none in every second step."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.net.wte(words)[:, :2].sum(1)
        for block in self.net.blocks[: 2 - self.global_step % 2]:
            x = block(x)
        return self.net.head(x)


class Unused(Plain):
    """A part of it never has one."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WORDS, WORDS)


class Complex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WORDS, WORDS, dtype=torch.complex64) / 4)

    def forward(self, words: Tensor) -> Tensor:
        return (super().forward(words).to(torch.complex64) @ self.turn).real


class OddSizes(Plain):
    """A scalar, sizes that no number of devices divides, one that is smaller than two, and none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.odd = nn.Parameter(torch.randn(3, 7, 5) / 10)
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, words: Tensor) -> Tensor:
        logits = super().forward(words) * self.temperature * self.one + self.empty.sum()
        return logits + torch.cat([self.odd.mean((0, 2)), self.odd.mean((0, 1))])


class TwoDtypes(Plain):
    """The head and its loss are in 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WORDS, WORDS, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(super().forward(words).double()).float()


class Parametrized(Plain):
    """Weights that are computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            torch.nn.utils.parametrizations.weight_norm(block.up)
        torch.nn.utils.parametrizations.orthogonal(self.net.head)


class Versioned(Plain):
    """Keeps what is no tensor, also inside of a compiled part, and the state of a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(Remembering(), backend="eager")
        self.seen = MeanMetric()
        self.seen.persistent(True)
        self.version = 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.version = 2
        return super().training_step(batch, batch_idx) * self.net.weight_of_loss

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]


class Remembering(Network):
    weight_of_loss = 1.0

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words)

    def get_extra_state(self) -> Any:
        return {"weight_of_loss": self.weight_of_loss}

    def set_extra_state(self, state: Any) -> None:
        self.weight_of_loss = state["weight_of_loss"]


class Averaging(Plain):
    """Keeps an average of its weights and a buffer, by which it is tested; a weight is tied, and a block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight = self.net.wte.weight
        self.net.blocks[0].requires_grad_(False)
        self.register_buffer("step", torch.zeros(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.step.fill_(self.global_step)
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EMA(decay=0.8)]


class Unfreezing(Plain):
    """Trains without its blocks for an epoch of one step, and then these too, at a rate of their own."""

    samples = 8  # of an epoch
    frozen_epochs = 1

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net.blocks

    def configure_callbacks(self) -> list[pl.Callback]:
        return [BackboneFinetuning(self.frozen_epochs)]


class UnfreezingLater(Unfreezing):
    """Does so after the step that is saved."""

    frozen_epochs = 2


class FreezingByTurns(Plain):
    """Trains its blocks by turns, and keeps an average; the optimizer has both, in one group, from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        for index, block in enumerate(self.net.blocks):
            block.requires_grad_(self.global_step % 2 == index)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EMA(decay=0.8)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-5)


class Scripted(Plain):
    """A part is TorchScript, whose parameters are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head = torch.jit.script(self.net.head)
