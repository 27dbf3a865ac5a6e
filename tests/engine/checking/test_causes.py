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

CAUSES = {
    modules.Unseeded: "generator that nobody seeds",
    modules.Replaying: "state in Python objects",
    modules.PastLightning: "optimizer stepped past Lightning",
    modules.Normed: "batch norm",
    modules.OverItems: "loss that is no mean over samples",
    modules.Dice: "loss over the local batch",
    modules.Noisy: "noise by rank",
    modules.MovedInForward: "weights written outside of the optimizer",
    modules.ScaledByRank: "weights written outside of the optimizer",
    modules.Queued: "buffers that ranks change each for itself",
}
IN_ONE_PROCESS = (modules.Unseeded, modules.Replaying, modules.PastLightning)
DAILY = (modules.Unseeded, modules.Dice)


def test_each_cause_has_a_module_and_a_remedy() -> None:
    assert {*CAUSES.values(), "operation that the strategy can't do"} == REMEDIES.keys()
    page = (CHECKOUT / "docs" / "promises.md").read_text()
    assert [name for name, remedy in REMEDIES.items() if f"| {name} |" not in page or remedy not in page] == []
    assert {*EXPECTED} < REMEDIES.keys()  # those of the table of a fork


@pytest.mark.parametrize("module", [*DAILY, *at_night(*(CAUSES.keys() - {*DAILY}))], ids=lambda module: module.__name__)
def test_what_differs_in_one_process_or_under_a_strategy_has_its_cause(
    module: type[pl.LightningModule], pool: Pool, tmp_path: Path
) -> None:
    found = trial(pool, tmp_path, module)
    causes = list(of_one(found.one, found.comparison))
    if module not in IN_ONE_PROCESS:
        assert not causes
        assert found.comparison.all_tensors(found.whole).first is not None
        causes = [of_difference(found.evidence, found.comparison, found.whole)]
    assert [cause.name for cause in causes] == [CAUSES[module]], causes


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_2", "ddp", "deepspeed_stage_3")])
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
