"""Whatever a module is made of, it trains under every strategy as in one process, or is refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightswitch
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.errors import Refused
from lightswitch.export.__main__ import main as export
from tests.engine.fits import Curve, Fit
from tests.engine.strategies import shapes
from tests.night import at_night
from tests.pool import Pool, RankFailed

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of which torch has some for what these modules are made of
SHAPES = [
    name
    for name, found in vars(shapes).items()
    if type(found) is type and issubclass(found, shapes.Plain) and found is not shapes.Plain
]
WITH_UNUSED = ("BranchOfUnits", "Unused")
FINDS_UNUSED = "ddp find_unused_parameters=true"
STRATEGIES = ("ddp", "fsdp", "fsdp_grad_op", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3)))

_DDP = (
    "{} did not contribute to the loss, but ddp waits for every gradient; freeze unused parameters "
    "(requires_grad=False), or type trainer.strategy.find_unused_parameters=true"
)
_STEPPED = (
    "{} did not contribute to the loss of step {}, but DeepSpeed also updates parameters without a gradient; freeze "
    "unused ones (requires_grad=False), or use strategy=fsdp"
)
_ONE_DTYPE = "{} has dtype {}, but DeepSpeed needs one real dtype for all parameters; use strategy=fsdp or ddp"
_OF_DEEPSPEED = {
    "BranchOfUnits": _STEPPED.format(
        "net.blocks.1.down.bias, net.blocks.1.down.weight, net.blocks.1.norm.bias and 3 more parameters", 1
    ),
    "Unused": _STEPPED.format("spare.bias, spare.weight", 0),
    "Complex": _ONE_DTYPE.format("turn", "torch.complex64"),
    "TwoDtypes": _ONE_DTYPE.format("out.weight", "torch.float64"),
    **dict.fromkeys(
        ("Unfreezing", "UnfreezingLater"),
        "BackboneFinetuning: DeepSpeed trains the parameters that require gradients when it is set up; use "
        "strategy=fsdp",
    ),
    "FreezingByTurns": "requires_grad of net.blocks.0.norm.weight, net.blocks.0.norm.bias, net.blocks.0.up.weight and "
    "9 more parameters has changed since the run began (step 1), but DeepSpeed trains the parameters that require "
    "gradients when it is set up; set it in the module's constructor, or use strategy=fsdp",
}
_SCRIPTED = {
    "Scripted": "net.head is scripted (torch.jit.script), so its parameters can't be replaced by shards; leave that to "
    "compile=true, or use strategy=ddp"
}
REFUSED = {
    "ddp": {
        "BranchOfUnits": _DDP.format(
            "net.blocks.1.norm.weight, net.blocks.1.norm.bias, net.blocks.1.up.weight and 3 more parameters"
        ),
        "Unused": _DDP.format("spare.weight, spare.bias"),
    },
    "fsdp": _SCRIPTED,
    "fsdp_grad_op": _SCRIPTED,
    "deepspeed_stage_1": _OF_DEEPSPEED,
    "deepspeed_stage_2": _OF_DEEPSPEED,
    "deepspeed_stage_3": {
        **_OF_DEEPSPEED,
        **_SCRIPTED,
        "OddSizes": "temperature has no dimension, and DeepSpeed's stage 3 can't shard it; give it the shape (1,), or ",
        "Versioned": "net is wrapped by torch.compile, whose parameters ",
    },
}
SAVED, END = 2, 4  # steps

Cell = dict[str, Any]
Alone = Callable[[str], tuple[Cell, Path]]


@pytest.fixture(scope="session")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What came of a shape in one process, and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("shapes")
    return cache(lambda shape: (pool(1)(trained, "single", shape, None, folder / shape)[0], folder / shape))


def trained(strategy: str, shape: str, checkpoint: Path | None, folder: Path) -> Cell:
    """What came of a shape in this rank: it is trained, saved, read back and tested.

    Args:
        strategy: a file of conf/strategy, with options.
        checkpoint: of one process, from which it goes on after a few steps of its own; None to train without a break.
    """
    begun, resumed = Curve(), Curve()
    module = _module(shape, seed=1)
    data = shapes.Sentences(getattr(module, "samples", 64))
    _trainer(strategy, folder, SAVED if checkpoint else END, begun).fit(module, data)
    module = _module(shape, seed=2)
    trainer = _trainer(strategy, folder, END, resumed)
    if checkpoint:
        trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.test(module, data, ckpt_path=folder / f"checkpoints/step_{END}.ckpt", verbose=False)
    losses = [loss for curve in (begun, resumed) for loss in curve.columns["train/loss"].values()]
    (test,) = resumed.columns["test/loss"].values()
    return {"losses": losses, "test": test, "extra": module.get_extra_state() if shape == "Versioned" else None}


def _module(shape: str, seed: int) -> pl.LightningModule:
    pl.seed_everything(seed, workers=True, verbose=False)
    return getattr(shapes, shape)()


def _trainer(strategy: str, folder: Path, steps: int, curve: Curve) -> pl.Trainer:
    arguments = f"gradient_clip_val=0.5 default_root_dir={folder}"
    fit = Fit(pl.LightningModule, pl.LightningDataModule, strategy, 8, 2, steps, arguments)
    return fit.trainer(LastCheckpoints(str(folder / "checkpoints"), every_n_steps=SAVED), logger=curve)


UNSENT = ("Buffers", "Complex") if torch.__version__.startswith("2.8.") else ()  # of dtypes that its gloo lacks
EVERY = [(strategy, shape) for strategy in STRATEGIES for shape in SHAPES if strategy != "ddp" or shape not in UNSENT]
EVERY += [(FINDS_UNUSED, shape) for shape in WITH_UNUSED]
BY_DAY = {  # each shape that needs something of its own, under the strategy that has to do most for it
    "ddp": ("Scripted",),
    FINDS_UNUSED: ("BranchOfUnits",),
    "fsdp": (
        *("TiedBlocks", "Buffers", "BranchOfUnits", "Complex", "OddSizes", "TwoDtypes"),
        *("Parametrized", "Versioned", "FreezingByTurns", "Scripted"),
    ),
    "deepspeed_stage_1": ("Unused", "Unfreezing"),
    "deepspeed_stage_2": ("OddSizes",),
    "deepspeed_stage_3": ("OddSizes", "Averaging", "Versioned"),
}
_CHOSEN = [(strategy, shape) for strategy, shapes in BY_DAY.items() for shape in shapes]
CELLS = [*_CHOSEN, *at_night(*(cell for cell in EVERY if cell not in _CHOSEN))]


@pytest.mark.parametrize(("strategy", "shape"), CELLS)
def test_a_shape_trains_resumes_tests_and_exports_as_in_one_process(
    strategy: str, shape: str, alone: Alone, pool: Pool, tmp_path: Path
) -> None:
    expected, folder_alone = alone(shape)
    saved = folder_alone / f"checkpoints/step_{SAVED}.ckpt"
    if line := REFUSED.get(strategy, {}).get(shape):
        with pytest.raises(RankFailed) as refused:
            pool(2)(trained, strategy, shape, saved, tmp_path)
        assert isinstance(refused.value.error, Refused)
        assert str(refused.value.error).startswith(line)
        return
    cell = pool(2)(trained, strategy, shape, saved, tmp_path)[0]
    assert len(cell["losses"]) == len(expected["losses"]) == END
    differences = [abs(one - other) for one, other in zip(cell["losses"], expected["losses"], strict=True)]
    assert max(*differences, abs(cell["test"] - expected["test"])) <= 1e-5
    assert cell["extra"] == expected["extra"]
    found, exported_alone = exported(tmp_path, shape), exported(folder_alone, shape)
    assert found.keys() == exported_alone.keys()
    for name, value in exported_alone.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, name
            continue
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        assert torch.allclose(found[name], value, rtol=0, atol=1e-4), name


def exported(folder: Path, shape: str) -> dict[str, Any]:
    file = folder / "exported.pt"
    if not file.exists():
        (folder / "config.yaml").write_text(f"model:\n  _target_: {shapes.__name__}.{shape}\n")
        export([str(folder / f"checkpoints/step_{END}.ckpt"), "-o", str(file)])
        lightswitch.load(file)
    return torch.load(file)
