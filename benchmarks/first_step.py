"""A run that ends after its first step: in train.py, in a plain Trainer and in plain torch.

python -m benchmarks.first_step                 # in plain torch, without importing Lightning
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, SAMPLES, BATCH = 32, 10, 1024, 32


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, WIDTH), torch.randint(CLASSES, (SAMPLES,)))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def end(*_: Any) -> None:
    """End the process at once, because Python's cleanup is not part of the start."""
    os._exit(0)


def main() -> None:
    model = network()
    stepping = optimizer(model)
    for inputs, classes in DataLoader(samples(), BATCH, shuffle=True):
        nn.functional.cross_entropy(model(inputs), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        end()


if __name__ == "__main__":
    main()
