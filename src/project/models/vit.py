"""A vision transformer (Dosovitskiy et al. 2020) for small grey images."""

from typing import Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from project.models.transformer import Embedding, Linear, Shape, Transformer
from project.optimizer import OptimizerFactory, SchedulerFactory, configured

Batch = tuple[Tensor, Tensor]  # images (batch, 1, size, size) and classes (batch,)


class VisionTransformer(LightningModule):
    """Vision transformer with overlapping patches, learned positions, and mean pooling in place of a class token.

    Args:
        image_size: height and width, in pixels.
        patches_per_side: number of patches along each side of an image.
        classes: number of classes.
        layers: number of blocks of attention and MLP.
        heads: number of attention heads, which divides the width.
        width: size of a patch's vector.
        optimizer: factory of the optimizer of its parameters.
        scheduler: factory of the learning-rate schedule; None for a constant rate.
        mlp_width: size of the MLP's hidden layer; None for four times the width, or as many parameters under swiglu.
        dropout: fraction of values dropped in training, from 0 to 1.
        norm: layer has a mean and a bias, rms has neither.
        mlp: gelu, or the gated swiglu.
        bias: whether linear layers have a bias.
        init_std: standard deviation of the initial weights.
        label_smoothing: fraction of a label that is spread over all classes, from 0 to 1.
        gradient_checkpointing: recompute a block's activations in the backward pass instead of storing them.
    """

    def __init__(
        self,
        image_size: int,
        patches_per_side: int,
        classes: int,
        layers: int,
        heads: int,
        width: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        mlp_width: int | None = None,
        dropout: float = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        mlp: Literal["gelu", "swiglu"] = "gelu",
        bias: bool = True,
        init_std: float = 0.02,
        label_smoothing: float = 0.0,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        shape = Shape(
            layers=layers,
            heads=heads,
            width=width,
            mlp_width=mlp_width,
            dropout=dropout,
            norm=norm,
            mlp=mlp,
            bias=bias,
            causal=False,
            init_std=init_std,
            gradient_checkpointing=gradient_checkpointing,
        )
        check_patches(image_size, patches_per_side)
        self.image_size = image_size
        self.patch_size = image_size // patches_per_side
        self.label_smoothing = label_smoothing
        self.optimizer, self.scheduler = optimizer, scheduler
        self.margin = self.patch_size // 2
        self.patches = Linear((self.patch_size + 2 * self.margin) ** 2, width, bias=True, std=init_std)
        self.positions = Embedding(patches_per_side**2, width, std=init_std)
        self.dropout = nn.Dropout(dropout)
        self.transformer = Transformer(shape)
        self.head = Linear(width, classes, bias=True, std=init_std)
        self.evaluation_loss = MeanMetric()
        self.evaluation_accuracy = MulticlassAccuracy(classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes) of images (batch, 1, size, size)."""
        if images.shape[1:] != (1, self.image_size, self.image_size):
            raise ValueError(
                f"found a batch of {images.dtype} of shape {tuple(images.shape)}; expected grey images "
                f"(batch, 1, {self.image_size}, {self.image_size}), as from data=digits or fashion_mnist; "
                "model.image_size is data.image_size unless it is set"
            )
        x = self.patches(patches(images, self.patch_size, self.margin))
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        x = self.transformer(self.dropout(x))
        logits: Tensor = self.head(x.mean(1))
        return logits

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images).float(), labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluate(batch)

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self.evaluate(batch)

    def predict_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Return the probability of each class: (batch, classes)."""
        images, _ = batch
        probabilities: Tensor = self(images).float().softmax(-1)
        return probabilities

    def evaluate(self, batch: Batch) -> None:
        images, labels = batch
        logits = self(images).float()
        self.evaluation_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.evaluation_accuracy.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")

    def log_evaluation(self, stage: str) -> None:
        """Log means over all images of all ranks, which the metrics gather."""
        metrics = {"loss": self.evaluation_loss, "accuracy": self.evaluation_accuracy}
        self.log_dict({f"{stage}/{name}": metric.compute() for name, metric in metrics.items()})
        for metric in metrics.values():
            metric.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configured(self, self.optimizer, self.scheduler)


def check_patches(image_size: int, patches_per_side: int) -> None:
    if patches_per_side < 1 or image_size % patches_per_side:
        sizes = ", ".join(str(side) for side in range(1, image_size + 1) if image_size % side == 0)
        raise ValueError(
            f"an image of {image_size} × {image_size} does not divide into {patches_per_side} patches a side; "
            f"use model.patches_per_side of {sizes}"
        )


def patches(images: Tensor, patch_size: int, margin: int) -> Tensor:
    """Cut images (batch, 1, size, size) into (batch, patches, pixels), each with `margin` pixels of its neighbours."""
    return F.unfold(images, patch_size + 2 * margin, padding=margin, stride=patch_size).transpose(1, 2)
