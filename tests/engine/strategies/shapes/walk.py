"""Each shape of module under one strategy, one after the other in the processes of one group.

A shape is trained for a few steps and saved; the checkpoint of the strategy before in the ring is resumed from and
trained to the end; the last checkpoint is read back and tested. What came of it is written as JSON.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger

from lightswitch.batches.callback import GlobalBatch
from lightswitch.batches.plan import BatchPlan
from lightswitch.checkpoints.freezing import Freezing
from lightswitch.checkpoints.last import LastCheckpoints
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import hooked
from lightswitch.launch.loop import replace_loops
from lightswitch.strategies.callbacks import KnownCallbacks
from tests.engine.conftest import as_torchrun, context
from tests.engine.strategies.shapes import modules

SAVED, END = 2, 4  # steps
CELL_SECONDS = 60  # for one shape, the start of the processes included
_SETTLE_SECONDS = 5

Cell = dict[str, Any]


def strategies() -> dict[str, Callable[[], Any]]:
    from lightswitch.deepspeed.strategy import DeepSpeed
    from lightswitch.strategies.ddp import DDP
    from lightswitch.strategies.fsdp import FSDP
    from lightswitch.strategies.fsdp1 import FSDP1
    from lightswitch.strategies.single import Single
    from lightswitch.strategies.tensor_parallel import TensorParallel

    return {
        "single": Single,
        "ddp": DDP,
        "ddp find_unused": partial(DDP, find_unused_parameters=True),
        "fsdp": FSDP,
        "fsdp_grad_op": partial(FSDP, sharding_strategy="SHARD_GRAD_OP"),
        "fsdp in bfloat16": partial(FSDP, param_dtype="bfloat16", reduce_dtype="float32"),
        "fsdp_tp": partial(TensorParallel, 2, {"Unfreezing": f"{modules.__name__}.cut"}),
        "fsdp1": FSDP1,
        **{f"deepspeed_stage_{stage}": partial(DeepSpeed, stage=stage) for stage in (1, 2, 3)},
    }


def walk(strategy: str, before: dict[str, Path | None], folder: Path) -> dict[str, Cell]:
    """What came of each shape; processes that have failed are replaced for the shapes that are left.

    Args:
        before: the checkpoint to resume from, by shape; None to train without a break.
    """
    folder.mkdir(parents=True)
    done: dict[str, Cell] = {}
    while left := [shape for shape in before if shape not in done]:
        ended = _run(strategy, {shape: before[shape] for shape in left}, folder)
        for shape in left:
            done[shape] = _cell(folder, shape, ranks(strategy)) or {"error": ended}
            if _is_failure(done[shape]):
                break
    return done


def ranks(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def _run(strategy: str, before: dict[str, Path | None], folder: Path) -> str:
    """Until all shapes are done or one of them has failed; how the processes ended."""
    environments = as_torchrun(2, strategy) if ranks(strategy) == 2 else [{}]
    processes = [
        context.Process(target=_rank, args=(strategy, before, folder, rank, environment))
        for rank, environment in enumerate(environments)
    ]
    for process in processes:
        process.start()
    end, finished, ended = time.monotonic() + CELL_SECONDS, 0, ""
    while any(process.is_alive() for process in processes):
        time.sleep(0.05)
        if (count := len(list(folder.glob("*.json")))) != finished:
            finished, end = count, time.monotonic() + CELL_SECONDS
        if not ended and (codes := [process.exitcode for process in processes if process.exitcode]):
            ended, end = f"a rank ended with {codes[0]}", time.monotonic() + _SETTLE_SECONDS
        if time.monotonic() > end:
            ended = ended or f"it did not end in {CELL_SECONDS} s"
            break
    for process in processes:
        process.kill()
        process.join()
    return ended


def _cell(folder: Path, shape: str, count: int) -> Cell | None:
    """Rank 0's, or the first error of a rank; what the engine refuses before what follows of it."""
    found = [path for rank in range(count) if (path := folder / f"{shape}.{rank}.json").exists()]
    cells = [json.loads(path.read_text()) for path in sorted(found, key=lambda path: path.stat().st_mtime)]
    errors = sorted((cell for cell in cells if "error" in cell), key=lambda cell: "refused" not in cell)
    if errors:
        return errors[0]
    return json.loads(found[0].read_text()) if len(found) == count else None


def _is_failure(cell: Cell) -> bool:
    """Not so what is refused, which all ranks are told alike."""
    return "error" in cell and "refused" not in cell


def _rank(strategy: str, before: dict[str, Path | None], folder: Path, rank: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    for shape, checkpoint in before.items():
        try:
            cell = _trained(strategy, shape, checkpoint, folder / shape)
        except Refused as error:
            cell = {"error": str(error), "refused": True}
        except BaseException as error:
            traceback.print_exc()
            cell = {"error": f"{type(error).__name__}: {error}"}
        partial_file = folder / f"{shape}.{rank}.partial"
        partial_file.write_text(json.dumps(cell))
        partial_file.rename(partial_file.with_suffix(".json"))
        if _is_failure(cell):
            os._exit(1)  # the other rank may wait for this one


def _trained(strategy: str, shape: str, checkpoint: Path | None, folder: Path) -> Cell:
    begun, resumed = _Curve(), _Curve()
    module = _module(shape, seed=1)
    data = modules.Sentences(getattr(module, "samples", 64))
    _trainer(strategy, folder, SAVED if checkpoint else END, begun).fit(module, data)
    module = _module(shape, seed=2)
    trainer = _trainer(strategy, folder, END, resumed)
    if checkpoint:
        trainer.fit(module, data, ckpt_path=checkpoint)
    trainer.test(module, data, ckpt_path=folder / f"checkpoints/step_{END}.ckpt", verbose=False)
    extra = module.get_extra_state() if shape == "Versioned" else None
    return {"losses": begun.losses + resumed.losses, "test": resumed.test, "extra": extra}


def _module(shape: str, seed: int) -> pl.LightningModule:
    pl.seed_everything(seed, workers=True, verbose=False)
    return getattr(modules, shape)()


def _trainer(strategy: str, folder: Path, steps: int, curve: Logger) -> pl.Trainer:
    replicas = 1 if strategy == "fsdp_tp" else ranks(strategy)
    plan = BatchPlan.derive(global_batch=8, micro_batch=2, replicas=replicas)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks(strategy),
        strategy=hooked(strategies()[strategy]()),
        max_steps=steps,
        accumulate_grad_batches=plan.accumulation,
        gradient_clip_val=0.5,
        callbacks=[
            *(KnownCallbacks(), GlobalBatch(plan, seed=3), Freezing()),
            LastCheckpoints(str(folder / "checkpoints"), every_n_steps=SAVED),
        ],
        logger=curve,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    replace_loops(trainer)
    return trainer


class _Curve(Logger):
    """The loss of each step, and that of the test."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.test: float | None = None

    @property
    def name(self) -> str:
        return "curve"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        return

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            self.losses.append(metrics["train/loss"])
        self.test = metrics.get("test/loss", self.test)
