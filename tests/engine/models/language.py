"""A language model as people write them: a causal transformer over bytes, built in `configure_model`."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import cross_entropy, linear
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric

from tests.engine.models.transformer import Blocks, decay_groups

BYTES = 256

Batch = tuple[Tensor, Tensor]  # bytes and those that follow them, each (batch, time)


class LanguageModel(pl.LightningModule):
    """A tied head has no module of its own: the embedding is used twice."""

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        context: int = 32,
        layers: int = 2,
        heads: int = 2,
        width: int = 32,
        dropout: float = 0.0,
        bias: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler
        self.context, self.width, self.head_count, self.tied = context, width, heads, tied
        self.options = {"layers": layers, "heads": heads, "dropout": dropout, "bias": bias}
        self.evaluation_loss = MeanMetric()
        self.transformer: Blocks | None = None

    def configure_model(self) -> None:
        if self.transformer is not None:
            return
        self.tokens = nn.Embedding(BYTES, self.width)
        self.positions = nn.Embedding(self.context, self.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=self.width**-0.5)
        self.transformer = Blocks(width=self.width, causal=True, **self.options)
        self.head = None if self.tied else nn.Linear(self.width, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Bytes (batch, time) to logits (batch, time, 256)."""
        if ids.is_floating_point():
            raise ValueError(f"found a batch of {ids.dtype} of shape {tuple(ids.shape)}; expected bytes (batch, time)")
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.transformer(x)
        return linear(x, self.tokens.weight) if self.head is None else self.head(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]).float().flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation_loss.update(self.training_step(batch, batch_idx), weight=batch[1].numel())

    test_step = validation_step

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """The logits, of a batch or of its bytes alone."""
        return self(batch if isinstance(batch, Tensor) else batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")

    def log_evaluation(self, stage: str) -> None:
        """The mean over all bytes of all ranks, which the metric gathers."""
        self.log(f"{stage}/loss", self.evaluation_loss.compute())
        self.evaluation_loss.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer(decay_groups(self))
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


class HalfFrozen(LanguageModel):
    """Its first block is not trained."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.transformer is not None
        self.transformer.blocks[0].requires_grad_(False)


def tensor_parallel(model: LanguageModel, devices: int) -> dict[str, ParallelStyle]:
    """Whole heads and whole hidden units on each device; embeddings are not cut.

    Raises:
        ValueError: the heads do not divide over the devices.
    """
    if model.head_count % devices:
        raise ValueError(f"{model.head_count} heads do not divide over a tensor-parallel group of {devices}")
    cut = {
        **{f"attention.{name}": ColwiseParallel() for name in ("queries", "keys", "values")},
        "attention.output": RowwiseParallel(),
        "mlp.input": ColwiseParallel(),
        "mlp.output": RowwiseParallel(),
    }
    plan: dict[str, ParallelStyle] = {f"transformer.blocks.*.{layer}": style for layer, style in cut.items()}
    return {**plan, "head": ColwiseParallel(output_layouts=Replicate())}
