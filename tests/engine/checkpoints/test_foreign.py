"""A run can start from what other code has written: Lightning's own strategies, and safetensors."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file

from lightswitch.checkpoints.portable import PortableCheckpoints, _mapping
from lightswitch.checkpoints.reading import Reader
from lightswitch.errors import UnfitCheckpoint
from tests.engine.conftest import PLAIN, Finished, Train, once
from tests.engine.tiny import LANGUAGE
from tests.engine.ways import WAYS
from tests.night import at_night


class AsLightning(pl.Callback):
    """Writes ``folder``/lightnings.ckpt after training, past what makes checkpoints portable."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "lightnings.ckpt"

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        stock: Any = super(PortableCheckpoints, trainer.strategy)  # the last of these bases
        trainer.strategy._state_dict_type = "sharded"  # FSDPStrategy's, which takes it as an argument
        checkpoint = {"pytorch-lightning_version": pl.__version__, "global_step": trainer.global_step}
        checkpoint["state_dict"] = stock.lightning_module_state_dict()
        checkpoint["optimizer_states"] = [stock.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        stock.save_checkpoint(checkpoint, self.path)


# A run can start from what Lightning's own strategies have written

RUN = (*LANGUAGE, "run_id=mine", "trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.limit_val_batches=1")
AS_LIGHTNING = (
    "callbacks.lightnings._target_=tests.engine.checkpoints.test_foreign.AsLightning",
    "callbacks.lightnings.folder=${hydra:runtime.output_dir}",
)

fresh = once(*RUN, "strategy=single", *AS_LIGHTNING)


@pytest.mark.nightly
def test_a_run_starts_from_its_weights(fresh: Finished, train: Train) -> None:
    path = fresh.run_dir / "lightnings.ckpt"
    tested = train(*RUN, "mode=test", f"ckpt_path={path}", "strategy=single")
    assert tested.column("test/loss")[0] == pytest.approx(fresh.column("test/loss")[4], abs=1e-5)
    begun = train(*RUN, f"init_from={path}", "strategy=fsdp", "run_id=new", "trainer.max_steps=1", ranks=2)
    assert begun.column("train/loss")[0] < fresh.column("train/loss")[0] - 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["fsdp × 2", "deepspeed_stage_3 × 2", *at_night("deepspeed_stage_2 × 2")])
def test_a_sharded_directory_is_refused_with_what_converts_it(way: str, train: Train) -> None:
    written = train(*RUN, *WAYS[way].switches, *AS_LIGHTNING, ranks=WAYS[way].ranks)
    path = written.run_dir / "lightnings.ckpt"
    refused = train(*RUN, "mode=test", f"ckpt_path={path}", "strategy=single", check=False)
    typed = re.search(r"; type (python .*), and use (.*)$", refused.refusal)
    assert typed is not None, refused.err
    words = shlex.split(typed[1])
    subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True, timeout=1000)
    tested = train(*RUN, "mode=test", f"ckpt_path={path.parent / typed[2]}", "strategy=single")
    assert tested.column("test/loss")[0] == pytest.approx(written.column("test/loss")[4], abs=1e-5)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, tmp_path / "odd.ckpt")
    (tmp_path / "empty").mkdir()
    for name in ("odd.ckpt", "empty"):
        with pytest.raises(UnfitCheckpoint, match=rf"{name} can't be read as a checkpoint: [^\n]*$"):
            Reader(tmp_path / name, group=None)


def test_a_file_of_torch_before_it_wrote_archives_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert Reader(tmp_path / "old.pt", group=None).read_weights()["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["lightnings.ckpt", "model.ckpt"])
def test_it_is_not_resumed(name: str, fresh: Finished, train: Train) -> None:
    path = fresh.run_dir / name
    refused = train(*RUN, f"resume={path}", "run_id=new", check=False)
    assert f"{path} can't be resumed: it contains no position in the data" in refused.refusal
    assert f"init_from={path}" in refused.refusal


# Weights of other code, in safetensors, that a run starts from

SHORT = (*PLAIN, "trainer.max_steps=1", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1", "run_id=mine")


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
    words = (*SHORT, f"init_from={folder}", "init_names={body.: net.}", *WAYS[way].switches)
    run = train(*words, ranks=WAYS[way].ranks)
    bias = run.column("train/loss")[0] - math.log(4)  # which stays as it was drawn
    assert 0 < abs(bias) < 0.1
    assert f"3 of the model's 4 tensors are in {folder}" in run.out
    assert "net.3.bias keep" in run.out + run.err
    assert "pooler.weight of" in run.out + run.err


def test_names_that_fit_nothing_are_refused_with_both_sides(folder: Path, train: Train) -> None:
    refused = train(*SHORT, f"init_from={folder}", check=False)
    told = "none of its 4 tensors has the name of a tensor in the model; it has body.0.bias"
    assert told in refused.refusal
    assert "type 'init_names={body.: net.}'" in refused.refusal


@pytest.mark.parametrize(
    ("found", "wanted", "typed"),
    [
        ("conv.weight bn.weight fc.weight", "net.conv.weight net.bn.weight net.fc.weight net.fc.bias", "{.: net.}"),
        ("module.conv.weight module.fc.weight", "conv.weight fc.weight", '{module.: ""}'),
        ("a.x.0.weight a.x.1.weight b.weight", "c.d.0.weight c.d.1.weight", "{a.x.: c.d.}"),
        ("a.weight", "b.weight", "{old.: new.}"),
        ("a.b", "c.d", "{old.: new.}"),
    ],
)
def test_the_prefix_that_most_names_want_is_proposed(found: str, wanted: str, typed: str) -> None:
    assert _mapping({*found.split()}, {*wanted.split()}) == f"'init_names={typed}'"
