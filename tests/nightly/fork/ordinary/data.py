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


class Sentences(Pictures):
    def setup(self, stage=None):
        g = torch.Generator().manual_seed(0)
        self.sets = []
        for n in (256, 64):
            ids = torch.randint(100, (n, 32), generator=g)
            self.sets.append(TensorDataset(ids, ids.roll(1, 1)))
