"""What can't be sent to a process that Python spawns is named before one is started."""

from __future__ import annotations

import sys

from torch import nn

from lightswitch.failures.launchers import first_unpicklable
from tests.engine.conftest import PLAIN, Train
from tests.engine.plain import PlainModel


class WithLambda(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Sequential(nn.Identity()))
        self.net[1][0].twice = lambda x: 2 * x


def test_a_part_that_can_not_be_pickled_is_named_in_a_line(train: Train) -> None:
    module = "model._target_=tests.engine.failures.test_unpicklable.WithLambda"
    run = train(*PLAIN, module, "strategy=ddp_spawn", "trainer.devices=2", check=False)
    assert run.returncode == 2
    assert run.err == (
        "error: model.net.1.0.twice is a lambda, which can't be sent to the processes that strategy=ddp_spawn starts; "
        "use strategy=ddp, which builds the model in each\n"
    )


def test_so_is_one_of_a_local_class() -> None:
    class Local(nn.Identity):
        pass

    says = "get" if sys.version_info >= (3, 13) else "pickle"
    told = first_unpicklable({"model": nn.Sequential(nn.Identity(), Local())})
    assert told == f"model.1: Can't {says} local object '{test_so_is_one_of_a_local_class.__name__}.<locals>.Local'"
