"""Two models and a dataset as a student brings them to a fork: in the style of public code, not in this project's."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Pictures(LightningDataModule):
    def __init__(self, batch_size=16, num_workers=0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        g = torch.Generator().manual_seed(0)
        self.sets = []
        for n in (256, 64):
            x, y = torch.randn(n, 3, 16, 16, generator=g), torch.randint(10, (n,), generator=g)
            self.sets.append(TensorDataset(x, y))

    def loader(self, i, shuffle=False):
        h = self.hparams
        return DataLoader(self.sets[i], batch_size=h.batch_size, shuffle=shuffle, num_workers=h.num_workers)

    def train_dataloader(self):
        return self.loader(0, True)

    def val_dataloader(self):
        return self.loader(1)

    def test_dataloader(self):
        return self.loader(1)


class ConvNet(LightningModule):
    def __init__(self, width=16, num_classes=10, lr=0.1, weight_decay=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, num_classes),
        )  # fmt: skip
        self.acc = MulticlassAccuracy(num_classes)

    def step(self, batch, stage):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_acc", self.acc(logits, y), prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.step(batch, "test")

    def configure_optimizers(self):
        h = self.hparams
        opt = torch.optim.SGD(self.parameters(), lr=h.lr, momentum=0.9, weight_decay=h.weight_decay)
        steps = self.trainer.estimated_stepping_batches
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, h.lr, total_steps=steps)
        return [opt], [{"scheduler": sched, "interval": "step"}]


class GAN(LightningModule):
    def __init__(self, latent=16, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 64), nn.LeakyReLU(0.2), nn.Linear(64, 3 * 16 * 16), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def forward(self, z):
        return self.generator(z).view(-1, 3, 16, 16)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt_g, opt_d = self.optimizers()
        fake = self(torch.randn(x.shape[0], self.hparams.latent, device=self.device))
        ones, zeros = torch.ones(len(x), 1, device=self.device), torch.zeros(len(x), 1, device=self.device)

        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()

        d_real = F.binary_cross_entropy_with_logits(self.discriminator(x), ones)
        d_loss = (d_real + F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), zeros)) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        sample = (self(torch.randn(8, self.hparams.latent, device=self.device)).detach() + 1) / 2
        self.logger.experiment.add_images("generated", sample, self.current_epoch)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [g, d], []
