import copy
import math

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F


def cosine_betas(timesteps, s=0.008):
    x = torch.linspace(0, timesteps, timesteps + 1)
    bar = torch.cos(((x / timesteps) + s) / (1 + s) * math.pi * 0.5) ** 2
    bar = bar / bar[0]
    return torch.clip(1 - (bar[1:] / bar[:-1]), 0.0001, 0.9999)


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / (half - 1))
        args = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat((args.sin(), args.cos()), dim=-1))


class UNet(nn.Module):
    def __init__(self, dim=16, channels=3):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.inp = nn.Conv2d(channels, dim, 3, padding=1)
        self.down = nn.Conv2d(dim, dim, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, dim)
        self.mid = nn.Conv2d(dim, dim, 3, padding=1)
        self.up = nn.ConvTranspose2d(dim, dim, 2, stride=2)
        self.out = nn.Conv2d(2 * dim, channels, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x))
        y = F.silu(self.norm(self.down(h))) + self.time(t)[:, :, None, None]
        y = self.up(F.silu(self.mid(y)))
        return self.out(torch.cat((h, y), dim=1))


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_model_average(self, ma_model, current_model):
        for current, ma in zip(current_model.parameters(), ma_model.parameters(), strict=False):
            ma.data = ma.data * self.beta + current.data * (1 - self.beta)


class DDPM(LightningModule):
    def __init__(self, timesteps=50, dim=16, lr=2e-4, ema_decay=0.99):
        super().__init__()
        self.save_hyperparameters()
        self.model = UNet(dim)
        self.ema_model = copy.deepcopy(self.model)
        self.ema_model.requires_grad_(False)
        self.ema = EMA(ema_decay)
        alphas_cumprod = torch.cumprod(1.0 - cosine_betas(timesteps), dim=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))

    def q_sample(self, x, t, noise):
        a = self.sqrt_alphas_cumprod[t][:, None, None, None]
        b = self.sqrt_one_minus_alphas_cumprod[t][:, None, None, None]
        return a * x + b * noise

    def p_losses(self, model, x):
        t = torch.randint(0, self.hparams.timesteps, (x.shape[0],), device=self.device).long()
        noise = torch.randn_like(x)
        return F.mse_loss(model(self.q_sample(x, t, noise), t), noise)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = self.p_losses(self.model, x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema.update_model_average(self.ema_model, self.model)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", self.p_losses(self.ema_model, x), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.hparams.lr)
