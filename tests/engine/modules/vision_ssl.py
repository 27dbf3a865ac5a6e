"""Self-supervised learning of images: views (batch, 64) of them, made by the dataset."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, mse_loss, normalize

Views = tuple[Tensor, Tensor, Tensor]


def encoder(features: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, features))


class MoCo(pl.LightningModule):
    """He et al. 2019: a momentum encoder moved by `.data =` in the step, and a queue of keys of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", normalize(torch.randn(16, 24), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        keys = self.all_gather(keys).flatten(0, -2)  # (world, batch, features)
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.queue_ptr[0] = (pointer + len(keys)) % self.queue.shape[1]

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        q = normalize(self.encoder_q(batch[0]), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = normalize(self.encoder_k(batch[1]), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
        self._dequeue_and_enqueue(k)
        return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=self.device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder_q.parameters(), lr=0.05, momentum=0.9)


class BYOL(pl.LightningModule):
    """Grill et al. 2020: a target network moved after each batch, and a predictor before it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = encoder(), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad = False

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        losses = []
        for one, other in ((batch[0], batch[1]), (batch[1], batch[0])):
            with torch.no_grad():
                aim = self.target(other)
            losses.append(2 - 2 * cosine_similarity(self.predictor(self.online(one)), aim).mean())
        self.log("align", losses[0])
        return sum(losses)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = target.data * 0.9 + online.data * 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3, eps=1e-5)


class DINO(pl.LightningModule):
    """Caron et al. 2021: a teacher moved by `mul_` and `add_`, and a center of what it says over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = encoder(), encoder()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 16))

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        teacher = self.teacher(batch[0])
        aim = ((teacher - self.center) / 0.3).softmax(-1).detach()
        loss = torch.sum(-aim * (self.student(batch[1]) / 0.5).log_softmax(-1), -1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        total = teacher.sum(0, keepdim=True)
        count = torch.tensor(float(len(teacher)))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
            torch.distributed.all_reduce(count)
        self.center = self.center * 0.9 + total / count * 0.1

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        with torch.no_grad():
            for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                teacher.data.mul_(0.9).add_((1 - 0.9) * student.detach().data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.05)


class SimCLR(pl.LightningModule):
    """Chen et al. 2020: each sample against the others of its own rank."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def gathered(self, z: Tensor) -> Tensor:
        return z

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        one, other = (self.gathered(normalize(self.encoder(view), dim=1)) for view in batch[:2])
        logits = one @ other.T / 0.5
        labels = torch.arange(len(logits), device=self.device)
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class GatheredSimCLR(SimCLR):
    """The same against the samples of all ranks, by `self.all_gather(…, sync_grads=True)`."""

    def gathered(self, z: Tensor) -> Tensor:
        return self.all_gather(z, sync_grads=True).flatten(0, -2)


class CLIP(pl.LightningModule):
    """Radford et al. 2021: two towers and a learnt scale of logits, clamped after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        image, text = (
            self.all_gather(normalize(tower(view), dim=1), sync_grads=True).flatten(0, -2)
            for tower, view in zip((self.image, self.text), batch[:2], strict=True)
        )
        logits = self.logit_scale.exp() * image @ text.T
        labels = torch.arange(len(logits), device=self.device)
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logit_scale.data.clamp_(0.999, 4.6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SwAV(pl.LightningModule):
    """Caron et al. 2020: prototypes that are normalized in each step, before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.prototypes = nn.Linear(16, 6, bias=False)

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        with torch.no_grad():
            weight = self.prototypes.weight.data.clone()
            self.prototypes.weight.copy_(normalize(weight, dim=1, p=2))
        one, other = (self.prototypes(normalize(self.encoder(view), dim=1)) for view in batch[:2])
        return -(other.detach() / 0.2).softmax(1).mul((one / 0.5).log_softmax(1)).sum(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class KNNMonitor(pl.LightningModule):
    """As lightly monitors: features gathered in `on_validation_epoch_end` from a list of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder(), nn.Linear(16, 16)
        self.features: list[Tensor] = []
        self.labels: list[Tensor] = []

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        return mse_loss(self.predictor(self.encoder(batch[0])), batch[1][:, :16])

    def validation_step(self, batch: Views, batch_idx: int) -> None:
        self.features.append(normalize(self.encoder(batch[0]), dim=1))
        self.labels.append(batch[2])

    def on_validation_epoch_end(self) -> None:
        features, labels = torch.cat(self.features), torch.cat(self.labels)
        self.features.clear()
        self.labels.clear()
        nearest = (features @ features.T).fill_diagonal_(-1).argmax(1)
        self.log("knn_agrees", (labels[nearest] == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)
