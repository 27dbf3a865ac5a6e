"""Rank 0's values take the place of each rank's own. What several ranks get of them, test_fsdp.py shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from lightswitch.strategies.replicas import broadcast_metric_states, broadcast_weights, left_on_meta

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ties_kinds_and_values_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    broadcast_weights(model.modules(), CPU, done=set())

    assert model[1].weight is model[0].weight
    assert not model[0].bias.requires_grad
    assert "scale" not in model.state_dict()
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_module_that_has_its_values_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    done: set[nn.Module] = set()
    broadcast_weights(model[0].modules(), CPU, done)
    first, second = model[0].weight, model[1].weight
    broadcast_weights(model.modules(), CPU, done)
    assert model[0].weight is first
    assert model[1].weight is not second


def test_tensors_with_strides_of_their_own_are_laid_out_plainly() -> None:
    convolution = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    expected = convolution.weight.detach().clone()
    broadcast_weights(convolution.modules(), CPU, done=set())
    assert convolution.weight.is_contiguous()  # as fully_shard wants it
    assert torch.equal(convolution.weight, expected)


def test_states_of_metrics() -> None:
    model = nn.ModuleDict({"loss": MeanMetric()})
    model["loss"].update(3.0)
    broadcast_metric_states(model, CPU)
    assert model["loss"].compute() == 3.0


def test_what_has_no_values_is_named_by_its_path() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), MeanMetric())
        model[0].offset = torch.zeros(2)
        model[0].tables = {"a": torch.zeros(2)}
    assert left_on_meta(model) == ["0.offset", "0.tables"]
