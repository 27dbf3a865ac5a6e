"""What a save copies into memory, and that it opens no GPU which the run does not use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightswitch.checkpoints import directory
from lightswitch.checkpoints.format import read_index
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Stored, local
from lightswitch.checkpoints.writing import Writer, host_memory, replicas_of, share
from lightswitch.strategies.ddp import DDP
from lightswitch.strategies.fsdp import FSDP
from tests.engine.conftest import PLAIN, Train, context
from tests.engine.plain import PlainModel
from tests.engine.tiny import LANGUAGE
from tests.night import at_night


class Telling(PortableCheckpoints, Strategy):
    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        staged = super().stage(tensors)
        told_bytes = sum(local(tensor).nbytes for tensor in staged.values())
        Path(f"staged_{self.global_rank}").write_text(str(told_bytes))
        return staged


class TellingDDP(Telling, DDP):
    pass


class TellingFSDP(Telling, FSDP):
    pass


class LeavesGPUsAlone(PlainModel):
    def on_fit_end(self) -> None:
        assert not torch.cuda.memory_reserved()


GPT2 = [(50_257, 768), (1024, 768), *[(768, 2304), (768, 768), (768, 3072), (3072, 768), (768,)] * 12]
SAVED = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "micro_batch_size=null")


OF = "trainer.strategy._target_=tests.engine.checkpoints.test_staged."
SPREAD = {
    "ddp × 2": (2, "strategy=ddp", f"{OF}TellingDDP"),
    "fsdp_hybrid 2 × 2": (4, "strategy=fsdp_hybrid", f"{OF}TellingFSDP", "trainer.strategy.shard_size=2"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["fsdp_hybrid 2 × 2", *at_night("ddp × 2")])
def test_ranks_stage_the_state_once_and_equally(way: str, train: Train) -> None:
    ranks, *switches = SPREAD[way]
    run = train(*LANGUAGE, *SAVED, *switches, ranks=ranks)
    staged_bytes = [int((run.folder / f"staged_{rank}").read_text()) for rank in range(ranks)]
    (checkpoint,) = run.run_dir.glob("checkpoints/step_2.ckpt")
    state_bytes = sum(tensor.nbytes for tensor in read_index(checkpoint).like.values())
    assert sum(staged_bytes) == state_bytes
    assert max(staged_bytes) <= 1.2 * state_bytes / ranks


def test_each_tensor_is_written_by_one_rank_of_those_that_hold_it() -> None:
    held = {f"w{number}": torch.empty(shape, device="meta") for number, shape in enumerate(GPT2)}
    shares = [share(held, {name: replicas_of(one, rank, 8) for name, one in held.items()}, held) for rank in range(8)]
    assert sorted(name for own in shares for name in own) == sorted(held)
    largest = max(tensor.nbytes for tensor in held.values())
    assert max(sum(tensor.nbytes for tensor in own.values()) for own in shares) <= largest


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


class Device(ModuleType):
    """One that torch lets be registered: it is there, and can't be used."""

    is_available = staticmethod(lambda: True)

    def current_stream(self) -> None:
        raise AssertionError("a stream of the device was opened")


def _write_beside_a_device(path: Path) -> None:
    torch.utils.rename_privateuse1_backend("other")
    torch._register_device_module("other", Device("torch.other"))
    directory.write(path, {"model.w": torch.ones(3)}, {}, ranks=None)


def test_a_write_opens_no_stream_of_a_device(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, context) as process:  # for what can't be registered twice
        process.submit(_write_beside_a_device, tmp_path / "a.ckpt").result()
    assert (tmp_path / "a.ckpt" / "trainer.pt").exists()


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
    ends = "model._target_=tests.engine.checkpoints.test_staged.LeavesGPUsAlone"
    train(*PLAIN, ends, "trainer.accelerator=cpu", "strategy=single", "trainer.max_steps=4")


@pytest.mark.gpu
def test_a_gpus_state_is_staged_in_pinned_memory() -> None:
    state = {str(number): torch.rand(shape, device="cuda") for number, shape in enumerate(GPT2)}
    staged = Writer().stage(state)
    assert all(local(tensor).is_pinned() for tensor in staged.values())
    assert all(torch.equal(staged[name], tensor.cpu()) for name, tensor in state.items())


def test_where_memory_can_not_be_pinned_other_memory_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """As on a machine whose limit is reached; on one without a GPU nothing can be pinned."""
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    assert host_memory(torch.Size([3]), torch.uint8, is_pinned=True).shape == (3,)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "saves      to unpinned memory, which makes training wait longer"
    ]
