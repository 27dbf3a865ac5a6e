import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F


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
        z = torch.randn(x.shape[0], self.hparams.latent, device=self.device)
        fake = self(z)
        ones, zeros = torch.ones(len(x), 1, device=self.device), torch.zeros(len(x), 1, device=self.device)

        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()

        d_real = F.binary_cross_entropy_with_logits(self.discriminator(x), ones)
        d_fake = F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), zeros)
        d_loss = (d_real + d_fake) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        z = torch.randn(8, self.hparams.latent, device=self.device)
        sample = (self(z).detach() + 1) / 2
        self.logger.experiment.add_images("generated", sample, self.current_epoch)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [g, d], []
