"""Layers cut over a tensor-parallel group compute what whole ones do."""

from __future__ import annotations

import torch

from tests.engine.conftest import Train
from tests.engine.curves import largest_difference
from tests.engine.strategies.witness import COMMON, held, tensors
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import TENSOR_PARALLEL

TP = (*COMMON, *TENSOR_PARALLEL)


def test_two_by_two_devices_run_as_one(train: Train) -> None:
    steps = ("trainer.max_steps=25", "trainer.val_check_interval=25")
    alone = train(*LANGUAGE, *COMMON, *steps, "strategy=single")
    cut = train(*LANGUAGE, *TP, *steps, ranks=4)
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert largest_difference(cut, alone, metric) <= 1e-5, metric
    assert largest_difference(cut, alone, "grad_norm") <= 1e-4
    assert "24 samples a step = 6 × 2 devices × accumulation 2" in cut.out
    values = torch.load(alone.run_dir / "start_0.pt")
    matrices = sum(v.numel() for name, v in values.items() if ".attention." in name or ".mlp." in name)
    others = sum(v.numel() for v in values.values()) - matrices  # embeddings and norms are not cut, but sharded
    for rank in range(4):
        assert tensors(cut, "start", rank) == tensors(alone, "start", 0)
        assert held(cut, rank)["parameters"] == matrices / 4 + others / 2
        assert held(cut, rank)["optimizer"] == 2 * (matrices / 4 + others / 2)


def test_the_devices_of_a_group_drop_the_same_units(train: Train) -> None:
    options = ("model.dropout=0.3", "model.tied=false", "model.bias=true", "precision=bf16-mixed")
    cut = train(*LANGUAGE, *TP, *options, "trainer.max_steps=4", "trainer.val_check_interval=4", ranks=2)
    assert tensors(cut, "end", 0) == tensors(cut, "end", 1)
    assert max(cut.column("train/loss").values()) < 6
