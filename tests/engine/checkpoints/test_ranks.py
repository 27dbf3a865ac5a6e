"""Ranks save together: no rank waits for ever for another one, all hear of a failure, and each copies its share."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightswitch.checkpoints.shards import Box, Piece, local
from lightswitch.checkpoints.writing import Ranks, Writer, replicas_of, share, together
from lightswitch.collectives import of_ranks
from lightswitch.errors import LostRank, UnwrittenCheckpoint
from lightswitch.strategies.ddp import DDP, Single
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel
from tests.pool import Pool


class Absent(PlainModel):
    """Rank 1 comes to no save."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            time.sleep(3600)


TWO = (*PLAIN, "strategy=ddp", "run_id=mine", "trainer.max_steps=8", "callbacks.last_checkpoint.every_n_steps=2")
TWO += ("~callbacks.best_checkpoint", "global_batch_size=8")


@pytest.mark.nightly
def test_a_rank_that_does_not_come_to_a_save_is_named(train: Train) -> None:
    absent = ("model._target_=tests.engine.checkpoints.test_ranks.Absent", "trainer.strategy.timeout_seconds=45")
    run = train(*TWO, *absent, ranks=2, check=False)
    assert run.returncode == 1
    assert (
        run.err.splitlines()[0] == "the checkpoint could not be written: rank 1 did not reach the save of step_2.ckpt"
    )


def test_an_error_of_one_rank_is_the_error_of_all(pool: Pool) -> None:
    told = pool(2)(_outcome_where_rank_1, _fails)
    assert told == ["UnwrittenCheckpoint: the checkpoint could not be written: rank 1: no such device"] * 2


def test_what_rank_0_concludes_is_the_result_of_all(pool: Pool) -> None:
    assert pool(2)(_outcome_where_rank_1, _returns) == [[0, 1], [0, 1]]


def test_a_rank_that_is_late_is_named(pool: Pool) -> None:
    told = pool(3, timeout_seconds=60)(_outcome_where_rank_1, _is_late)
    assert told[0] == told[2] == "LostRank: the checkpoint could not be written: rank 1 did not write its shard"


LENGTHS = (1, *range(490, 520), 5000)  # of a text; short values are exchanged at once, with their lengths


def test_ranks_exchange_values_of_any_length(pool: Pool) -> None:
    assert pool(2)(_exchanged) == [[["", "é" * length] for length in LENGTHS]] * 2


def _exchanged() -> list[list[str]]:
    dist.init_process_group("gloo")
    return [of_ranks("é" * length * dist.get_rank()) for length in LENGTHS]


def _outcome_where_rank_1(does: Callable[[], int]) -> Any:
    dist.init_process_group("gloo")
    group = Ranks(timeout_seconds=2).writing
    try:
        return together(group, "write its shard", does if dist.get_rank() == 1 else dist.get_rank, list)
    except (UnwrittenCheckpoint, LostRank) as error:
        return f"{type(error).__name__}: {error}"


def _fails() -> int:
    raise TypeError("no such device")


def _returns() -> int:
    return 1


def _is_late() -> int:
    time.sleep(6)
    return 1


class Harmed(DDP):
    def __init__(self, how: str) -> None:
        super().__init__()
        self._writer = HarmedWriter(how)


class HarmedWriter(Writer):
    """In the second save, rank 1 has a piece that it can't write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self._saves = how, 0

    def stage(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        self._saves += 1
        staged = super().stage(tensors)
        is_harmed = (self._saves, dist.get_rank()) == (2, 1)
        kind = {"is killed": Killing, "fails": Failing}[self.how]
        return {**staged, "model.more": kind(torch.zeros(2), torch.Size([2]), 0)} if is_harmed else staged


class Killing(Piece):
    def boxes(self) -> Iterator[Box]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().boxes()


class Failing(Piece):
    def boxes(self) -> Iterator[Box]:
        raise TypeError("no such device")


HARMED = (*TWO, "trainer.strategy._target_=tests.engine.checkpoints.test_ranks.Harmed")


@pytest.mark.nightly
def test_a_rank_killed_in_a_save_is_named_and_what_resumes_the_run(train: Train) -> None:
    run = train(*HARMED, "trainer.devices=2", "+trainer.strategy.how='is killed'", check=False)
    assert re.fullmatch(r"rank 1 of 2 on \S+ failed: process \d+ was killed by SIGKILL", run.err.splitlines()[0])
    assert re.search("^go on      .* run_id=mine$", run.out, re.MULTILINE)
    assert not (run.run_dir / "checkpoints/step_4.ckpt").exists()


@pytest.mark.nightly
def test_a_write_that_fails_on_one_rank_costs_that_checkpoint_alone(train: Train) -> None:
    run = train(*HARMED, "+trainer.strategy.how=fails", "callbacks.last_checkpoint.keep=9", ranks=2)
    told = [line for line in run.out.splitlines() if "no such device" in line]
    assert told == [
        "the checkpoint could not be written: rank 1: no such device; training continues, and earlier checkpoints are "
        "kept",
    ]
    saved = {path.name for path in (run.run_dir / "checkpoints").glob("step_*.ckpt")}
    assert saved == {f"step_{step}.ckpt" for step in (2, 6, 8)}


# What a save copies into memory, and that it opens no GPU which the run does not use


class LeavesGPUsAlone(PlainModel):
    def on_fit_end(self) -> None:
        assert not torch.cuda.memory_reserved()


GPT2 = [(50_257, 768), (1024, 768), *[(768, 2304), (768, 768), (768, 3072), (3072, 768), (768,)] * 12]


def test_each_tensor_is_written_by_one_rank_of_those_that_hold_it() -> None:
    held = {f"w{number}": torch.empty(shape, device="meta") for number, shape in enumerate(GPT2)}
    shares = [share(held, {name: replicas_of(one, rank, 8) for name, one in held.items()}, held) for rank in range(8)]
    assert sorted(name for own in shares for name in own) == sorted(held)
    largest = max(tensor.nbytes for tensor in held.values())
    assert max(sum(tensor.nbytes for tensor in own.values()) for own in shares) <= largest


def test_a_save_that_a_lost_rank_has_cut_off_is_its_and_no_full_disks() -> None:
    """Of which the best checkpoint would tell to make room, with an exit code that no job script starts again."""

    def write(error: Exception) -> None:
        raise error

    strategy = Single()
    strategy._writer.write(partial(write, OSError(28, "No space left on device")))
    assert not strategy.has_written()
    strategy._writer.write(partial(write, LostRank("rank 1 did not write its shard")))
    with pytest.raises(LostRank, match="rank 1"):
        strategy.has_written()


def test_the_next_save_reuses_the_memory_of_a_copy() -> None:
    saver, state = Writer(), {"weight": torch.rand(3, 2)}
    first = local(saver.stage(state)["weight"]).data_ptr()
    assert local(saver.stage(state)["weight"]).data_ptr() == first
    grown = saver.stage({"weight": torch.ones(4, 2)})["weight"]
    assert torch.equal(local(grown), torch.ones(4, 2))


def test_what_is_staged_is_a_copy_of_every_kind_of_tensor() -> None:
    state = {
        "matrix": torch.arange(6.0).view(2, 3).t(),
        "number": torch.tensor(7, dtype=torch.int64),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "complex": torch.ones(2, dtype=torch.complex128),
        "flags": torch.tensor([True, False]),
    }
    staged = Writer().stage(state)
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor)
    state["flags"].logical_not_()
    assert staged["flags"].tolist() == [True, False]


def test_a_save_on_a_cpu_asks_nothing_of_cuda() -> None:
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("torch.cuda"):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        Writer().stage({"w": torch.ones(3)})
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.gpu
def test_a_run_on_cpus_leaves_the_gpus_alone(train: Train) -> None:
    ends = "model._target_=tests.engine.checkpoints.test_ranks.LeavesGPUsAlone"
    train(*PLAIN, ends, "trainer.accelerator=cpu", "strategy=single", "trainer.max_steps=4")


@pytest.mark.gpu
def test_a_gpus_state_is_staged_in_pinned_memory() -> None:
    state = {str(number): torch.rand(shape, device="cuda") for number, shape in enumerate(GPT2)}
    staged = Writer().stage(state)
    assert all(local(tensor).is_pinned() for tensor in staged.values())
    assert all(torch.equal(staged[name], tensor.cpu()) for name, tensor in state.items())
