"""The hooks of a run of two processes, rank by rank: those of a plain Trainer under Lightning's own strategy.

That is DDP for fsdp and fsdp1, too: Lightning's FSDPStrategy takes no CPU, and its ModelParallelStrategy a module alone
that shards itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

from tests.engine.conftest import as_torchrun, context, runs_in
from tests.engine.launch.hooked import WRITTEN, LeavesClipping
from tests.engine.launch.test_hook_order import LIMITS, RUN, SAVING, Calls, fit_and_test, saved

DeepSpeed = pytest.importorskip("lightswitch.deepspeed.strategy").DeepSpeed  # an extra
STRATEGIES = {  # and the plain one whose hooks are expected
    "ddp_fork": "ddp_fork",
    "fsdp": "ddp_fork",
    "fsdp1": "ddp_fork",
    "deepspeed_stage_3": "ZeRO",
}
RESUMED = ("ddp_fork", "deepspeed_stage_3")
CLIPPING = "configure_gradient_clipping"
CLIP_THEMSELVES = ("fsdp1", "deepspeed_stage_3")  # and refuse a module that does
RENAMED = {  # classes that torch and DeepSpeed make of a module and of an optimizer
    "FSDPLogging": "Logging",
    "DeepSpeedZeroOptimizer_Stage3": "DeepSpeedZeroOptimizer",
}
ByRank = list[Calls]
Ran = Callable[..., Path]


class Replicas(DDPStrategy):
    """Reads a checkpoint once the model is set up, as Lightning's sharded strategies do, and all of the engine's."""

    restore_checkpoint_after_setup = True


class Zero(DeepSpeedStrategy):
    """Lightning's own, with that alone replaced which asks for a GPU."""

    root_device = property(lambda strategy: torch.device("cpu", 0))
    setup_environment = DeepSpeed.setup_environment
    setup_distributed = DeepSpeed.setup_distributed


PLAIN: dict[str, Callable[[], Strategy]] = {
    "ddp_fork": lambda: Replicas(start_method="fork"),
    # with a size of batches, which it would ask the loader for
    "ZeRO": lambda: Zero(stage=2, logging_batch_size_per_gpu=20),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The folder of a plain run under a strategy, from its start or resumed at step 3."""

    @cache
    def ran(strategy: str, resumed: bool = False) -> Path:
        path = saved(ran(strategy)) if resumed else None
        folder = tmp_path_factory.mktemp("plain")
        environments = [{}] if strategy == "ddp_fork" else as_torchrun(2, folder.name)
        ranks = [context.Process(target=_train, args=(folder, own, strategy, path)) for own in environments]
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
    def ran(strategy: str, resumed: bool = False) -> Path:
        forks = strategy == "ddp_fork"
        given = [f"strategy={strategy}", *(["trainer.devices=2"] if forks else [])]
        given += [f"model._target_={LeavesClipping.__module__}.LeavesClipping"] if strategy in CLIP_THEMSELVES else []
        given += [f"ckpt_path='{saved(ran('ddp_fork'))}'"] if resumed else []
        return train(*RUN, *given, ranks=0 if forks else 2).folder

    return ran


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_calls_what_a_plain_trainers_calls(strategy: str, plain: Ran, ours: Ran) -> None:
    zero, one = ({call[1] for call in calls} for calls in _calls(plain(STRATEGIES[strategy])))
    assert zero - one >= {"prepare_data"}
    assert {"on_save_checkpoint", "on_sanity_check_start", "on_train_epoch_end", "on_test_end"} <= one
    _compare(strategy, plain(STRATEGIES[strategy]), ours(strategy))


@pytest.mark.parametrize("strategy", RESUMED)
def test_each_rank_calls_what_a_plain_trainers_calls_after_a_resume(strategy: str, plain: Ran, ours: Ran) -> None:
    expected = plain(STRATEGIES[strategy], resumed=True)
    assert all("on_load_checkpoint" in {call[1] for call in calls} for calls in _calls(expected))
    _compare(strategy, expected, ours(strategy, resumed=True))


def _compare(strategy: str, plain: Path, ours: Path) -> None:
    """Of ranks that are started in other ways, without the hook that each process calls before it forks others."""
    expected, found = _calls(plain), _calls(ours)
    if STRATEGIES[strategy] == "ddp_fork" != strategy:
        expected, found = _without("configure_callbacks", expected), _without("configure_callbacks", found)
    if strategy in CLIP_THEMSELVES:
        expected, found = _without(CLIPPING, expected), _without(CLIPPING, found)
    assert found == expected


def _without(hook: str, ranks: ByRank) -> ByRank:
    return [[call for call in calls if call[1] != hook] for calls in ranks]


def _train(folder: Path, environment: dict[str, str], strategy: str, path: Path | None) -> None:
    """Fit and test by Lightning alone, in a process of its own."""
    os.environ.update(environment)
    told = os.open(folder / f"told_{environment.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    os.chdir(folder)
    model, data, callback = WRITTEN
    trainer = Trainer(
        **LIMITS,
        strategy=PLAIN[strategy](),
        accelerator="cpu",
        devices=2,
        callbacks=[callback(), ModelCheckpoint(dirpath=folder / "saved", **SAVING)],
        default_root_dir=folder,
        logger=False,
        enable_model_summary=False,
    )
    fit_and_test(trainer, (model(), data(batch_size=20)), path)


def _calls(folder: Path) -> ByRank:
    texts = [(folder / f"hooks_{rank}.jsonl").read_text() for rank in range(2)]
    for made, name in RENAMED.items():
        texts = [text.replace(made, name) for text in texts]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]
