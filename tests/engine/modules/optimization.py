"""How classifiers of images (batch, 1, 8, 8) are optimized, regularized, scheduled and logged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics.classification import MulticlassAccuracy

from lightswitch.strategies.ema import EMA

Batch = tuple[Tensor, Tensor]


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *between, nn.ReLU(), nn.Linear(16, 4))


class Classifier(pl.LightningModule):
    """A perceptron, by SGD: what the others of this file change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class BatchNorm(Classifier):
    """Statistics of the rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(nn.BatchNorm1d(16))


class StepsCounted(Classifier):
    """A curriculum by a buffer that counts steps, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx) * (1 - 0.9**self.seen)


class SpectralNorm(Classifier):
    """Miyato et al. 2018: a power iteration in buffers, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.net[1])


class MultiTask(Classifier):
    """Kendall et al. 2017: weights of two losses are learnt, a number each."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.log_vars = nn.Linear(16, 1), nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in "ab")

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        features = self.net[:3](batch[0])
        brightness = batch[0].mean((1, 2, 3))
        losses = [
            cross_entropy(self.net[3](features), batch[1]),
            (self.bright(features).squeeze(-1) - brightness).square().mean(),
        ]
        loss = sum(torch.exp(-s) * one + s for one, s in zip(losses, self.log_vars, strict=True))
        return {"loss": loss, "classes": losses[0].detach(), "bright": losses[1].detach()}


class SAM(torch.optim.Optimizer):
    """Foret et al. 2020, as davda54/sam has it."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float = 0.05, **named: Any) -> None:
        super().__init__(params, dict(rho=rho, **named))
        self.base_optimizer = base(self.param_groups, **named)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([gradient.norm(p=2) for gradient in gradients]), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("SAM is stepped by first_step and second_step")


class Sharpness(Classifier):
    """Sharpness-aware minimization by hand: the optimizer's own two steps, past `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.second_step(zero_grad=True)
        return loss

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), torch.optim.SGD, lr=0.1)


class AdamWScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024, as facebookresearch/schedule_free has it: weights are y in training, and x elsewhere."""

    def __init__(self, params: Any, lr: float = 0.0025, betas: Any = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=False))

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["betas"][0])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - group["betas"][0])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called.")
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            (beta1, beta2), lr, k = group["betas"], group["lr"], group["k"]
            group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += group["lr_max"] ** 2
            ckp1 = group["lr_max"] ** 2 / group["weight_sum"]
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if "z" not in state:
                    state["z"], state["exp_avg_sq"] = torch.clone(p), torch.zeros_like(p)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"] / (1 - beta2 ** (k + 1))).sqrt_().add_(group["eps"])
                gradient = p.grad / denominator
                p.lerp_(end=state["z"], weight=ckp1)
                p.add_(gradient, alpha=lr * (beta1 * (1 - ckp1) - 1))
                state["z"].sub_(gradient, alpha=lr)
            group["k"] = k + 1
        return loss


class ShowsPictures(Classifier):
    """What Lightning's examples show by `self.logger.experiment`: a number, a histogram, images."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        board = self.logger.experiment
        board.add_scalar("by_hand", loss.item(), self.global_step)
        board.add_histogram("pixels", batch[0], self.global_step)
        board.add_image("first", batch[0][0].clamp(0, 1), self.global_step)
        return loss


class ScheduleFree(Classifier):
    """Defazio et al. 2024: an optimizer that hooks switch between training's weights and their averages."""

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers().train()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return AdamWScheduleFree(self.parameters(), lr=0.01, eps=1e-4)


class LBFGS(Classifier):
    """A closure that is called several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2, line_search_fn="strong_wolfe")


class AccumulatesByHand(Classifier):
    """Gradients of two batches make a step, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)


class TwoBackward(Classifier):
    """Two losses, each with a backward pass of its own, and clipping by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self.net(batch[0])
        self.manual_backward(cross_entropy(logits, batch[1]), retain_graph=True)
        self.manual_backward(0.1 * logits.square().mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class MaxNorm(Classifier):
    """Rows of a weight are cut to a norm after each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net[1].weight.renorm_(2, 0, 0.5)


class OneCycle(Classifier):
    """Smith 2018, by the length of the run, stepped each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = OneCycleLR(optimizer, 0.2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Averaged(Classifier):
    """Averages of weights by the engine's callback, and a metric of torchmetrics'."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val/accuracy", self.accuracy, on_step=True, on_epoch=True)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EMA(decay=0.8)]


class GradientHooks(Classifier):
    """A gradient that is reversed on its way, one that a parameter scales, and clipping of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(16, 2)
        self.net[1].bias.register_hook(lambda gradient: gradient * 0.5)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = self.net[:3](batch[0])
        backwards = features.view_as(features)
        backwards.register_hook(lambda gradient: -0.1 * gradient)
        return cross_entropy(self.net[3](features), batch[1]) + cross_entropy(self.domain(backwards), batch[1] % 2)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="value")


class SkipsBatches(Classifier):
    """Returns None for a batch that it will not learn from."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class LogsOfEveryKind(Classifier):
    """`self.log` of each kind: by step, by epoch, both, sums, extremes, metrics, dicts, of one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.log("by_step", loss)
        self.log("by_both", loss, on_step=True, on_epoch=True, batch_size=len(logits))
        self.log("synced", loss, sync_dist=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("count", float(len(logits)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log_dict({"number": 3, "step": float(self.global_step)}, prog_bar=True)
        self.right(logits, batch[1])
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("rank_0", 1.0, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"val/a": loss, "val/b": 2 * loss}, batch_size=len(batch[0]))
