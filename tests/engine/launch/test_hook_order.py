"""The hooks of a run by train.py, rank by rank: those of a plain Trainer, in its order, also resumed.

The plain one has Lightning's own strategy. That is DDP for fsdp, too: Lightning's FSDPStrategy takes no CPU,
and its ModelParallelStrategy a module alone that shards itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from tests.engine.conftest import as_torchrun, context, runs_in
from tests.engine.launch.hooked import WRITTEN
from tests.night import at_night

SAVING = {"every_n_train_steps": 3, "save_top_k": -1, "save_on_train_epoch_end": False}
LIMITS = {
    **{"max_steps": 8, "val_check_interval": 2, "check_val_every_n_epoch": None},
    **{"gradient_clip_val": 1.0, "log_every_n_steps": 10, "enable_progress_bar": False},
}
RUN = (
    *(f"{node}._target_=tests.engine.launch.hooked.{name}" for node, name in (("model", "Model"), ("data", "Data"))),
    *("callbacks.told._target_=tests.engine.launch.hooked.Teller", "logger=csv", "~callbacks.lr_monitor"),
    *("~callbacks.best_checkpoint", "~callbacks.last_checkpoint", "~callbacks.progress", "~callbacks.throughput"),
    *("callbacks.mine._target_=lightning.pytorch.callbacks.ModelCheckpoint", "callbacks.mine.dirpath=saved"),
    *(f"callbacks.mine.{name}={json.dumps(value)}" for name, value in SAVING.items()),
    *(f"trainer.{name}={json.dumps(value)}" for name, value in LIMITS.items()),
    *("global_batch_size=40", "data.batch_size=40"),
)
STRATEGIES = {"single": "single", "ddp": "ddp", "fsdp": "ddp"}  # and the plain one whose hooks are expected
SAVING_HOOKS = ("on_save_checkpoint", "state_dict")
ByRank = list[list[list[Any]]]
Ran = Callable[..., Path]  # from a strategy and a mode to the folder of a run; of mode=fit by default


class Alone(SingleDeviceStrategy):
    """Reads a checkpoint once the model is set up, as Lightning's sharded strategies do, and all of the engine's."""

    restore_checkpoint_after_setup = True


class Replicas(DDPStrategy):
    """So does this one."""

    restore_checkpoint_after_setup = True


PLAIN: dict[str, Callable[[], Strategy]] = {"single": lambda: Alone("cpu"), "ddp": Replicas}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    @cache
    def ran(strategy: str, mode: str = "fit") -> Path:
        path = None if mode == "fit" else _saved(ran(strategy))
        folder = tmp_path_factory.mktemp("plain")
        with as_torchrun(0 if strategy == "single" else 2, folder.name) as started:
            environments = started or [{}]
            ranks = [context.Process(target=_run, args=(folder, own, strategy, path)) for own in environments]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
        told = "\n".join(path.read_text() for path in folder.glob("told_*"))
        assert [rank.exitcode for rank in ranks] == [0] * len(ranks), told
        return folder

    return ran


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    train = runs_in(tmp_path_factory.mktemp("ours"))

    @cache
    def ran(strategy: str, mode: str = "fit") -> Path:
        given = [f"strategy={strategy}"]
        given += [] if mode == "fit" else [f"ckpt_path='{_saved(ran(strategy))}'"]
        return train(*RUN, *given, ranks=0 if strategy == "single" else 2).folder

    return ran


@pytest.mark.parametrize("strategy", ["ddp", *at_night("single", "fsdp")])
def test_a_fit_and_its_test_call_in_each_rank_what_a_plain_trainer_calls(strategy: str, plain: Ran, ours: Ran) -> None:
    zero, *others = ({call[1] for call in calls} for calls in _calls(plain(STRATEGIES[strategy])))
    assert {"on_save_checkpoint", "on_sanity_check_start", "on_train_epoch_end", "on_test_end"} <= zero
    assert all("prepare_data" in zero - one for one in others)
    _compare(plain(STRATEGIES[strategy]), ours(strategy))


@pytest.mark.parametrize("strategy", ["single", *at_night("ddp")])
def test_a_resume_in_mid_epoch_calls_what_a_plain_trainer_calls(strategy: str, plain: Ran, ours: Ran) -> None:
    expected = plain(STRATEGIES[strategy], "resume")
    assert all("on_load_checkpoint" in {call[1] for call in calls} for calls in _calls(expected))
    _compare(expected, ours(strategy, "resume"))


def _compare(plain: Path, ours: Path) -> None:
    expected, found = _calls(plain), _calls(ours)
    for hook in SAVING_HOOKS:  # called before the next step, where a plain Trainer saves at a batch's end
        counts = [[[call[1] for call in calls].count(hook) for calls in ranks] for ranks in (expected, found)]
        assert counts[0] == counts[1], hook
        expected, found = _without(hook, expected), _without(hook, found)
    assert found == expected


def _without(hook: str, ranks: ByRank) -> ByRank:
    return [[call for call in calls if call[1] != hook] for calls in ranks]


def _run(folder: Path, environment: dict[str, str], strategy: str, path: Path | None) -> None:
    """Fit and test by Lightning alone, in a process of its own."""
    os.environ.update(environment)
    told = os.open(folder / f"told_{environment.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    os.chdir(folder)
    model, data, callback = WRITTEN
    devices = 1 if strategy == "single" else 2
    saving = ModelCheckpoint(dirpath=folder / "saved", **SAVING)
    trainer = Trainer(
        **LIMITS,
        strategy=PLAIN[strategy](),
        accelerator="cpu",
        devices=devices,
        callbacks=[callback(), saving],
        default_root_dir=folder,
        logger=False,
        enable_model_summary=False,
    )
    trained = (model(), data(batch_size=40 // devices))
    trainer.fit(*trained, ckpt_path=path, weights_only=True)
    trainer.test(*trained, ckpt_path=saving.best_model_path, verbose=False, weights_only=True)


def _saved(folder: Path) -> Path:
    (path,) = (folder / "saved").glob("*step=3.ckpt")
    return path


def _calls(folder: Path) -> ByRank:
    # of which torch makes a class for fsdp
    texts = [path.read_text().replace("FSDPLogging", "Logging") for path in sorted(folder.glob("hooks_*.jsonl"))]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]
