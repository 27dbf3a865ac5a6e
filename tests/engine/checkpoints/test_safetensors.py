"""Weights of other code, in safetensors, that a run starts from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightswitch.checkpoints.reader import hub_weights
from tests.engine.conftest import PLAIN, Train
from tests.engine.ways import WAYS
from tests.night import at_night

SHORT = (*PLAIN, "trainer.max_steps=1", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1", "run_id=mine")
NAMES = ("init_names={body.: net.}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that answers each class alike, under names that begin otherwise, in 16 bits and two files."""
    hidden = {"body.0.weight": torch.ones(16, 2), "body.0.bias": torch.zeros(16)}
    head = {"body.3.weight": torch.zeros(4, 16), "pooler.weight": torch.zeros(3)}
    shards = {"one.safetensors": hidden, "two.safetensors": head}
    for name, tensors in shards.items():
        save_file({key: value.bfloat16() for key, value in tensors.items()}, tmp_path / name)
    index = {key: name for name, tensors in shards.items() for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@pytest.mark.parametrize("way", ["fsdp × 2", *at_night("single", "deepspeed_stage_3 × 2")])
def test_a_run_starts_from_those_that_fit_and_tells_the_others(way: str, folder: Path, train: Train) -> None:
    words = (*SHORT, f"init_from={folder}", *NAMES, *WAYS[way].switches)
    run = train(*words, ranks=WAYS[way].ranks)
    bias = run.column("train/loss")[0] - math.log(4)  # which stays as it was drawn
    assert 0 < abs(bias) < 0.1
    assert f"3 of the model's 4 tensors are in {folder}" in run.out
    assert "net.3.bias keep" in run.out + run.err
    assert "pooler.weight of" in run.out + run.err


def test_names_that_fit_nothing_are_refused_with_both_sides(folder: Path, train: Train) -> None:
    refused = train(*SHORT, f"init_from={folder}", check=False)
    (line,) = (line for line in refused.err.splitlines() if line.startswith("error"))
    assert "none of its 4 tensors has the name of a tensor in the model; it has body.0.bias" in line
    assert "'init_names={old.: new.}'" in line
    assert refused.returncode == 2


def test_an_index_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(ValueError, match=r"names a file outside of its folder: \.\./x\.safetensors"):
        hub_weights(tmp_path)
