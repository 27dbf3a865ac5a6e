import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F


class Bert(LightningModule):
    def __init__(self, vocab=100, width=64, layers=2, heads=4, dropout=0.1, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.zeros(1, 64, width))
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.drop(self.emb(ids) + self.pos[:, : ids.shape[1]])
        return self.out(self.encoder(x))

    def loss(self, batch):
        ids, labels = batch
        return F.cross_entropy(self(ids).transpose(1, 2), labels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
