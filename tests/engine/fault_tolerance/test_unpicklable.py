"""What can't be sent to a process that Python spawns is named before one is started."""

from __future__ import annotations

import sys

import pytest
from torch import Tensor, nn

from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = lambda x: 2 * x

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x)


class WithLambda(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Sequential(Doubled()))


class WithLocalClass(PlainModel):
    def __init__(self) -> None:
        super().__init__()

        class Local(nn.Identity):
            pass

        self.net.insert(1, Local())


_SAYS = "get" if sys.version_info >= (3, 13) else "pickle"
CASES = {
    "WithLambda": "model.net.1.0.twice is a lambda",
    "WithLocalClass": f"model.net.1: Can't {_SAYS} local object 'WithLocalClass.__init__.<locals>.Local'",
}


@pytest.mark.parametrize("model", CASES)
def test_a_part_that_can_not_be_pickled_is_named_in_a_line(model: str, train: Train) -> None:
    module = f"model._target_=tests.engine.fault_tolerance.test_unpicklable.{model}"
    run = train(*PLAIN, module, "strategy=ddp_spawn", "trainer.devices=2", check=False)
    assert run.returncode == 2
    assert run.err == (
        f"error: {CASES[model]}, which can't be sent to the processes that strategy=ddp_spawn starts; use "
        "strategy=ddp, which builds the model in each\n"
    )
