"""Modules and data that are not the project's: their own batch size counts, and nothing that nobody typed is added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import PLAIN
from tests.engine.requests import composed, composing
from tests.engine.tiny import PICTURES

DATA = "tests.engine.preflight.test_foreign"


class TrainBatchData:
    def __init__(self, train_batch_size: int = 8) -> None: ...


SIZE = 4 * 3


class ByConstant:
    def __init__(self, batch_size: int = SIZE) -> None: ...


class Passing(ByConstant):
    def __init__(self, extra: int = 1, **kwargs: int) -> None:
        super().__init__(**kwargs)


class OtherData:
    def __init__(self, val_batch_size: int = 8) -> None: ...


OWN = {  # the global batch, by what is typed
    f"data._target_={DATA}.TrainBatchData data.train_batch_size=16": 16,
    f"data._target_={DATA}.TrainBatchData": 8,
    f"data._target_={DATA}.TrainBatchData data.train_batch_size=16 global_batch_size=32": 32,
    f"data._target_={DATA}.OtherData": 64,
    f"data._target_={DATA}.ByConstant": 12,
    f"data._target_={DATA}.Passing": 12,
    f"data._target_={DATA}.Passing data.batch_size=20": 20,
    f"data._target_={DATA}.TrainBatchData data.train_batch_size=${{global_batch_size}}": 64,
    f"data._target_={DATA}.TrainBatchData data.sharded_by=dataset": 64,
}


@pytest.fixture(autouse=True)
def _conf() -> Iterator[None]:
    with composing():
        yield


@pytest.mark.parametrize("typed", OWN)
def test_a_batch_size_of_the_datas_own_is_the_global_one_where_none_is_typed(typed: str, tmp_path: Path) -> None:
    assert composed(PLAIN[0], *typed.split(), into=tmp_path).cfg.global_batch_size == OWN[typed]


def test_gradients_are_clipped_where_that_is_typed_alone(tmp_path: Path) -> None:
    cfg = composed(*PLAIN, into=tmp_path).cfg
    assert "gradient_clip_val" not in cfg.trainer
    assert composed(PLAIN[0], PICTURES, "trainer=clipped", into=tmp_path).cfg.trainer.gradient_clip_val == 1.0
