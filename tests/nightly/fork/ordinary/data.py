import random

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


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


def collate(batch):
    longest = max(len(item["input_ids"]) for item in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, item in enumerate(batch):
        ids[row, : len(item["input_ids"])] = torch.tensor(item["input_ids"])
    labels = torch.tensor([item["label"] for item in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


class Sentences(Pictures):
    def setup(self, stage=None):
        rng = random.Random(0)
        self.sets = []
        for n in (256, 64):
            lengths = [rng.randint(4, 32) for _ in range(n)]
            texts = [[rng.randint(1, 99) for _ in range(length)] for length in lengths]
            self.sets.append([{"input_ids": ids, "label": ids[0] % 4} for ids in texts])

    def loader(self, i, shuffle=False):
        return DataLoader(self.sets[i], self.hparams.batch_size, shuffle=shuffle, collate_fn=collate)
