"""Each of the ten causes is named from what a module does, and none where it keeps the promises."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightswitch.checking.causes import REMEDIES, of_difference, of_one
from tests.engine.checking import modules
from tests.engine.checking.measured import trial
from tests.night import at_night
from tests.pool import Pool
from tests.project.promises import EXPECTED
from tests.runs import CHECKOUT

IN_ONE_PROCESS = {
    modules.Unseeded: "generator that nobody seeds",
    modules.Replaying: "state in Python objects",
    modules.PastLightning: "optimizer stepped past Lightning",
}
UNDER_DDP = {
    modules.Normed: "batch norm",
    modules.OverItems: "loss that is no mean over samples",
    modules.Summed: "loss that is no mean over samples",
    modules.Contrastive: "loss over the local batch",
    modules.Dice: "loss over the local batch",
    modules.Noisy: "noise by rank",
    modules.NoisyLater: "noise by rank",
    modules.NormedByHand: "batch norm",
    modules.SummedBesideFrozenNorm: "loss that is no mean over samples",
    modules.MovedInForward: "weights written outside of the optimizer",
    modules.ScaledByRank: "weights written outside of the optimizer",
    modules.Queued: "buffers that ranks change each for itself",
}


def test_each_cause_has_a_module_and_a_remedy() -> None:
    named = {*IN_ONE_PROCESS.values(), *UNDER_DDP.values(), "operation that the strategy can't do"}
    assert named == REMEDIES.keys()
    assert len(named) == 10
    page = (CHECKOUT / "docs" / "promises.md").read_text()
    assert [name for name, remedy in REMEDIES.items() if f"| {name} |" not in page or remedy not in page] == []


def test_the_table_of_a_fork_is_of_the_ten_causes() -> None:
    assert {*EXPECTED} < REMEDIES.keys()


@pytest.mark.parametrize("module", UNDER_DDP, ids=lambda module: module.__name__)
def test_a_difference_under_a_strategy_has_its_cause(
    module: type[pl.LightningModule], pool: Pool, tmp_path: Path
) -> None:
    found = trial(pool, tmp_path, module)
    assert not list(of_one(found.one, found.comparison))
    assert found.comparison.all_tensors(found.whole).first is not None
    cause = of_difference(found.evidence, found.comparison, found.whole)
    assert cause.name == UNDER_DDP[module], cause


@pytest.mark.parametrize("module", IN_ONE_PROCESS, ids=lambda module: module.__name__)
def test_what_one_process_does_not_do_twice_has_its_cause(
    module: type[pl.LightningModule], pool: Pool, tmp_path: Path
) -> None:
    found = trial(pool, tmp_path, module)
    (cause,) = of_one(found.one, found.comparison)
    assert cause.name == IN_ONE_PROCESS[module], cause


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", *at_night("ddp", "deepspeed_stage_3")])
def test_a_good_module_has_no_difference(strategy: str, pool: Pool, tmp_path: Path) -> None:
    found = trial(pool, tmp_path, modules.Good, strategy)
    whole = found.whole
    assert set(whole) == set(found.comparison.one)
    assert len(whole) == 5
    for compared in (found.comparison.all_tensors(whole), found.comparison.loss(whole)):
        assert compared.first is None
        assert compared.count
        assert compared.largest < 1e-5
    assert not list(of_one(found.one, found.comparison))
