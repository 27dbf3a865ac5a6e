"""Diffusion, codebooks, flows, autoencoders and adversaries, over images (batch, 64)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, mse_loss, one_hot, softplus

Noised = tuple[Tensor, Tensor, Tensor]
Image = tuple[Tensor, Tensor]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 32)
        self.into, self.out = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.into(x) + self.time(t)))


class LitEma(nn.Module):
    """The averages of a model in buffers, as latent-diffusion's ldm/modules/ema.py keeps them."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.m_name2s_name: dict[str, str] = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, parameter in model.named_parameters():
            self.m_name2s_name[name] = name.replace(".", "")
            self.register_buffer(self.m_name2s_name[name], parameter.clone().detach().data)
        self.collected_params: list[Tensor] = []

    def forward(self, model: nn.Module) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            shadow = dict(self.named_buffers())
            for name, parameter in model.named_parameters():
                average = shadow[self.m_name2s_name[name]]
                average.sub_((1.0 - decay) * (average - parameter))

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        shadow = dict(self.named_buffers())
        self.collected_params = [parameter.clone() for parameter in model.parameters()]
        for name, parameter in model.named_parameters():
            parameter.data.copy_(shadow[self.m_name2s_name[name]].data)
        try:
            yield
        finally:
            for kept, parameter in zip(self.collected_params, model.parameters(), strict=True):
                parameter.data.copy_(kept.data)


class LatentDiffusion(pl.LightningModule):
    """Rombach et al. 2021: averages in buffers, which stand in for the weights in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        self.model_ema = LitEma(self.model)
        self.register_buffer("alphas", torch.linspace(0.95, 0.05, 10), persistent=False)

    def loss(self, batch: Noised) -> Tensor:
        image, noise, t = batch
        alpha = self.alphas[t][:, None]
        return mse_loss(self.model(alpha.sqrt() * image + (1 - alpha).sqrt() * noise, t), noise)

    def training_step(self, batch: Noised, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.model_ema(self.model)

    @torch.no_grad()
    def validation_step(self, batch: Noised, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))
        with self.model_ema.scope(self.model):
            self.log("val/loss_ema", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3, eps=1e-5)


class DDPM(LatentDiffusion):
    """Ho et al. 2020, with noise and times that the step draws."""

    def training_step(self, batch: Noised, batch_idx: int) -> Tensor:
        image = batch[0]
        return self.loss((image, torch.randn_like(image), torch.randint(10, (len(image),), device=self.device)))


class VQEma(pl.LightningModule):
    """van den Oord et al. 2017: a codebook in buffers, which follows the mean of what all ranks assign to it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(8, 64)
        self.register_buffer("codebook", torch.randn(6, 8))
        self.register_buffer("cluster_size", torch.ones(6))
        self.register_buffer("embed_avg", self.codebook.clone())

    def training_step(self, batch: Noised, batch_idx: int) -> Tensor:
        z = self.encoder(batch[0])
        nearest = torch.cdist(z, self.codebook).argmin(-1)
        quantized = embedding(nearest, self.codebook)
        self.update(z.detach(), one_hot(nearest, 6).float())
        return mse_loss(self.decoder(z + (quantized - z).detach()), batch[0]) + 0.25 * mse_loss(z, quantized.detach())

    @torch.no_grad()
    def update(self, z: Tensor, assigned: Tensor) -> None:
        sizes, sums = assigned.sum(0), assigned.T @ z
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sizes)
            torch.distributed.all_reduce(sums)
        self.cluster_size.mul_(0.9).add_(sizes, alpha=0.1)
        self.embed_avg.mul_(0.9).add_(sums, alpha=0.1)
        self.codebook.data.copy_(self.embed_avg / (self.cluster_size[:, None] + 1e-5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


class VQDataInit(pl.LightningModule):
    """A trained codebook, which the first batch gives its values."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(8, 64)
        self.codebook = nn.Parameter(torch.zeros(4, 8))
        self.register_buffer("initted", torch.tensor(False))

    def training_step(self, batch: Noised, batch_idx: int) -> Tensor:
        z = self.encoder(batch[0])
        if not self.initted:
            self.codebook.data.copy_(z[:4].detach())
            self.initted.fill_(True)
        quantized = embedding(torch.cdist(z, self.codebook).argmin(-1), self.codebook)
        commitment = mse_loss(z, quantized.detach()) + mse_loss(z.detach(), quantized)
        return mse_loss(self.decoder(z + (quantized - z).detach()), batch[0]) + commitment

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class GAN(pl.LightningModule):
    """Goodfellow et al. 2014, as Lightning's docs have it: two optimizers, each with a backward pass, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: Noised, batch_idx: int) -> None:
        real, noise, _ = batch
        g, d = self.optimizers()
        self.toggle_optimizer(g)
        g_loss = softplus(-self.discriminator(self.generator(noise))).mean()
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        g.step()
        g.zero_grad()
        self.untoggle_optimizer(g)
        self.toggle_optimizer(d)
        fake = self.generator(noise).detach()
        d_loss = (softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake)).mean()) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        d.step()
        d.zero_grad()
        self.untoggle_optimizer(d)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5)
            for part in (self.generator, self.discriminator)
        ], []


class GradientPenalty(pl.LightningModule):
    """Gulrajani et al. 2017: a critic whose gradients are part of its loss, in automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: Noised, batch_idx: int) -> Tensor:
        real, fake, t = batch
        between = torch.lerp(real, fake, t[:, None] / 10).requires_grad_(True)
        gradient = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)[0]
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
