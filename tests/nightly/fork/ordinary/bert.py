import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F


class Bert(LightningModule):
    def __init__(self, vocab=100, width=64, layers=2, heads=4, num_labels=4, dropout=0.1, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.emb = nn.Embedding(vocab, width, padding_idx=0)
        self.pos = nn.Parameter(torch.zeros(1, 64, width))
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, num_labels)

    def forward(self, input_ids, attention_mask):
        x = self.drop(self.emb(input_ids) + self.pos[:, : input_ids.shape[1]])
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return self.classifier(x[:, 0])

    def step(self, batch, stage):
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits, batch["labels"])
        self.log(f"{stage}_loss", loss)
        return loss, logits

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")[0]

    def validation_step(self, batch, batch_idx):
        _loss, logits = self.step(batch, "val")
        self.log("val_acc", (logits.argmax(-1) == batch["labels"]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        no_decay = ["bias", "norm"]
        groups = [
            {
                "params": [p for n, p in self.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": 0.01,
            },
            {"params": [p for n, p in self.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.hparams.lr)
