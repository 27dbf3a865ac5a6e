"""Every process group of a run has the time-out of its strategy: the watchdog is to speak before torch does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightswitch.strategies.timeouts import set_timeouts, timeouts
from tests.engine.conftest import PLAIN, Train
from tests.engine.strategies.timed import TIMED
from tests.engine.tiny import LANGUAGE_MODEL, NO_CHECKPOINTS, TEXT
from tests.engine.ways import TENSOR_PARALLEL


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=900))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_without_a_time_out_of_its_own_gets_the_runs() -> None:
    by_default, by_choice = dist.new_group([0]), dist.new_group([0], timeout=timedelta(seconds=7))
    set_timeouts(timedelta(seconds=900))
    assert set(timeouts(by_default)) == {timedelta(seconds=900)}
    assert set(timeouts(by_choice)) == {timedelta(seconds=7)}


MODEL = (*LANGUAGE_MODEL, TEXT)
RUNS = {
    "fsdp_tp": (*MODEL, *TENSOR_PARALLEL, "trainer.strategy.timeout_seconds=900"),
    "fsdp1": (*PLAIN, "trainer.strategy.sharding_strategy=HYBRID_SHARD", "trainer.strategy.timeout_seconds=900"),
    "deepspeed_stage_2": (*PLAIN, "trainer.strategy.timeout={_target_: datetime.timedelta, seconds: 900}"),
}


@pytest.mark.parametrize("strategy", RUNS)
def test_a_strategys_groups_have_its_time_out(strategy: str, train: Train) -> None:
    switches = (f"strategy={strategy}", "trainer.accelerator=cpu", "trainer.max_steps=1", *NO_CHECKPOINTS)
    finished = train(*switches, *RUNS[strategy], *TIMED, ranks=2)
    found = json.loads((finished.run_dir / "timeouts.json").read_text())
    assert len(found) > 1, "there is a group beside the first"
    assert {seconds for _, each in found for seconds in each} == {900}
