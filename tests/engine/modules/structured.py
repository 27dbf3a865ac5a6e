"""Detection, segmentation, graphs, molecules, retrieval, control and learning to learn."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, l1_loss, mse_loss


class Detection(pl.LightningModule):
    """Carion et al. 2020, without its matching: a list of targets, and losses divided by the rank's own boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16))
        self.queries = nn.Embedding(3, 16)
        self.box, self.label = nn.Linear(16, 4), nn.Linear(16, 4)

    def training_step(self, batch: tuple[Tensor, list[dict[str, Tensor]]], batch_idx: int) -> Tensor:
        images, targets = batch
        found = self.backbone(images)[:, None] + self.queries.weight
        boxes, labels = self.box(found).sigmoid(), self.label(found)
        losses = [
            l1_loss(boxes[i, : len(t["boxes"])], t["boxes"], reduction="sum")
            + cross_entropy(labels[i, : len(t["boxes"])], t["labels"], reduction="sum")
            for i, t in enumerate(targets)
        ]
        self.log("boxes", float(sum(len(t["boxes"]) for t in targets)), reduce_fx="sum", batch_size=len(images))
        return sum(losses) / sum(len(t["boxes"]) for t in targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        backbone = {"params": self.backbone.parameters(), "lr": 1e-3}
        others = [p for name, p in self.named_parameters() if not name.startswith("backbone")]
        return torch.optim.AdamW([{"params": others}, backbone], lr=3e-3, eps=1e-5)


class GraphNetwork(pl.LightningModule):
    """Messages along edges, over graphs that a collate joins into one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(4, 12), nn.Linear(12, 1)
        self.messages = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, (source, target) = self.into(batch["x"]), batch["edges"]
        for layer in self.messages:
            x = x + torch.zeros_like(x).index_add(0, target, layer(x)[source].relu())
        pooled = torch.zeros(len(batch["y"]), 12, device=x.device).index_add(0, batch["graph"], x)
        return self.head(pooled).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return mse_loss(self(batch), batch["y"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/error", (self(batch) - batch["y"]).abs().mean(), batch_size=len(batch["y"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class ForceField(pl.LightningModule):
    """Schütt et al. 2017: forces are the gradient of an energy, and both are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_(True)
            energy = self.energy(positions).sum((1, 2))
            forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        return energy, forces

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        energy, forces = self(batch[0])
        return 0.01 * mse_loss(energy, batch[1]) + mse_loss(forces, batch[2])

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch).detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class MAML(pl.LightningModule):
    """Finn et al. 2017, of second order: an inner step by functional calls, task by task."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = []
        for x, y, x_query, y_query in zip(*(batch[name] for name in ("x", "y", "x_query", "y_query")), strict=True):
            weights = dict(self.net.named_parameters())
            inner = mse_loss(functional_call(self.net, weights, (x,)), y)
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            losses.append(mse_loss(functional_call(self.net, fast, (x_query,)), y_query))
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Snapshot(pl.LightningModule):
    """Learning without forgetting: a deep copy of the network, made within a step, is what later ones are held to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images = batch[0].flatten(1)
        before = copy.deepcopy(self.net).eval().requires_grad_(False)
        with torch.no_grad():
            aim = before(images)
        logits = self.net(images + 0.1)
        return cross_entropy(logits, batch[1]) + mse_loss(logits, aim)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DQN(pl.LightningModule):
    """Mnih et al. 2015, offline: a target network that is loaded anew every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2))
        self.target.load_state_dict(self.net.state_dict())
        self.target.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        values = self.net(batch["state"]).gather(1, batch["action"][:, None]).squeeze(-1)
        with torch.no_grad():
            aims = batch["reward"] + 0.9 * self.target(batch["next"]).max(1)[0]
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())
        return mse_loss(values, aims)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05)
