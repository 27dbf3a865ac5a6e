"""A classifier of points, and its equal for Hugging Face's libraries."""

from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel


class PointsConfig(PretrainedConfig):
    model_type = "points"

    def __init__(self, width: int = 16, **options: object) -> None:
        super().__init__(**options)
        self.width = width


class HubPoints(PreTrainedModel):
    """What those who get the folder import, and read it with: `HubPoints.from_pretrained(folder)`."""

    config_class = PointsConfig

    def __init__(self, config: PointsConfig) -> None:
        super().__init__(config)
        self.layers = layers(config.width)
        self.post_init()

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)


class Points(LightningModule):
    """Four classes of points in the plane.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.net = layers(width)

    def forward(self, points: Tensor) -> Tensor:
        return self.net(points)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, classes, _ = batch
        return cross_entropy(self(points), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def to_hf(self) -> list[PreTrainedModel]:
        hub = HubPoints(PointsConfig(self.width))
        hub.layers.load_state_dict(self.net.state_dict())
        return [hub]

    def from_hf(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("layers.", "net."): weight for name, weight in weights.items()}


def layers(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 4))
