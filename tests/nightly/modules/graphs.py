"""A network of torch_geometric's over graphs that its loader joins into one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Graphs(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(4, width), GCNConv(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, data: Data) -> Tensor:
        x = data.x
        for conv in self.convs:
            x = conv(x, data.edge_index).relu()
        return self.head(global_mean_pool(x, data.batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch), batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch), batch.y), batch_size=batch.num_graphs)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class GraphData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        self.graphs = []
        for _ in range(200):
            nodes = int(torch.randint(3, 9, (1,), generator=generator))
            edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
            x = torch.randn(nodes, 4, generator=generator)
            self.graphs.append(Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.graphs[:160], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.graphs[160:], batch_size=self.batch_size)

    test_dataloader = val_dataloader
