"""What a run says of its model: of all that the model's hooks have built."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from lightswitch.monitoring.notices import ModelSize
from tests.engine.monitoring.tiny import Regression, loader, trainer


class BuiltInSetup(Regression):
    """As Lightning's documentation has it, where the data tell a size; a lazy layer is asked for it."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.Linear(5, 1))  # of another size than before
        self.net(next(iter(loader()))[0])


class BuiltTwice(BuiltInSetup):
    def configure_model(self) -> None:
        self.net = nn.Sequential(self.net, nn.Linear(1, 1))


@pytest.mark.parametrize(("model", "parameters"), [(Regression, 49), (BuiltInSetup, 31), (BuiltTwice, 33)])
def test_a_model_is_counted_when_its_hooks_have_built_it(
    model: type[Regression], parameters: int, tmp_path: Path
) -> None:
    size = ModelSize()
    trainer(tmp_path, callbacks=[size], max_steps=1).fit(model(), loader(), loader())
    assert size.counts == {"parameters": parameters, "trained_parameters": parameters}
