"""Weights and optimizer states taken out of a DeepSpeed engine in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.shards import Piece, local
from lightswitch.deepspeed import state as zero_state
from tests.engine.strategies.witness import whole


class TakenOut(pl.Callback):
    """Takes weights and optimizer states out before a step, writes over them, and puts them back."""

    def __init__(self, folder: str, before_step: int) -> None:
        self.folder, self.before_step, self.done = Path(folder), before_step, False

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if self.done or trainer.global_step != self.before_step:
            return
        self.done, engine = True, trainer.strategy.model
        taken = taken_out(engine, module)
        other = {
            name: (weight + 1, {k: (v + 1).to(v.dtype) for k, v in state.items()})
            for name, (weight, state) in taken.items()
        }
        put_back(engine, module, other)
        assert_equal(taken_out(engine, module), other)
        for name, parameter in module.named_parameters():
            assert torch.equal(whole(parameter).float(), other[name][0].float()), name
        put_back(engine, module, taken)
        assert_equal(taken_out(engine, module), taken)
        torch.save(taken_out(engine, module), self.folder / f"taken_{trainer.global_rank}.pt")


State = dict[str, tuple[Tensor, dict[str, Tensor]]]


def taken_out(engine: object, module: pl.LightningModule) -> State:
    return {
        name: (_put_together(weight), {key: _put_together(state[key]) for key in sorted(state)})
        for name, weight, state in zero_state.pieces(engine, module)
    }


def _put_together(kept: Tensor | Piece) -> Tensor:
    if isinstance(kept, Tensor):
        return kept.clone()
    whole = torch.zeros(kept.shape, dtype=kept.values.dtype)
    kept.of(whole).copy_(kept.values)
    dist.all_reduce(whole.view(torch.uint8) if whole.dtype == torch.bool else whole)
    return whole


def put_back(engine: Any, module: pl.LightningModule, taken: State) -> None:
    for name, kept, _ in zero_state.pieces(engine, module):
        local(kept).copy_(kept.of(taken[name][0]) if isinstance(kept, Piece) else taken[name][0])
    zero_state.update_working_copy(engine, module)
    engine.optimizer.optimizer.state.clear()  # as in a run that resumes
    zero_state.scatter_states(engine, module, lambda name: taken[name][1])


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, (weight, state) in expected.items():
        assert torch.equal(found[name][0], weight), name
        assert found[name][1].keys() == state.keys(), name
        assert all(torch.equal(found[name][1][key], value) for key, value in state.items()), name


class Native(pl.Callback):
    """The same of a run in one process, for comparison."""

    def __init__(self, folder: str, before_step: int) -> None:
        self.folder, self.before_step = Path(folder), before_step

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int) -> None:
        if trainer.global_step == self.before_step:
            states = trainer.optimizers[0].state
            taken = {n: (p.detach().clone(), dict(states.get(p, {}))) for n, p in module.named_parameters()}
            torch.save(taken, self.folder / "taken_0.pt")
