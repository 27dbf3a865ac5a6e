"""A mistake that all jobs of a sweep have is told before the first; one that some of them have is theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lightswitch.cluster import placement
from lightswitch.config.overrides import normalised
from lightswitch.launch.hydra_entry import register_resolvers
from lightswitch.sweeps.multirun import shared_problems
from tests.engine.config.mistaken import answers
from tests.engine.conftest import CHECKOUT
from tests.engine.tiny import LANGUAGE_MODEL, TEXT

OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2")
TYPO = ["trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?"]

Told = Callable[..., list[str]]


@pytest.fixture
def told() -> Iterator[Told]:
    def of(*typed: str, model: Sequence[str] = LANGUAGE_MODEL) -> list[str]:
        loader = GlobalHydra.instance().config_loader()
        words = normalised([*model, TEXT, *typed, "hydra.mode=MULTIRUN"])
        cfg = loader.load_configuration("config", words, RunMode.MULTIRUN)
        return shared_problems(cfg, partial(loader.load_sweep_config, cfg))

    register_resolvers(placement.detect())
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        yield of
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize(
    "swept",
    [
        ("seed=1,2",),
        ("seed=range(1,4)", "model.layers=choice(2,3)"),
        ("strategy=fsdp,ddp",),
        (*OPTUNA, "optimizer.lr=tag(log,interval(1e-4,1e-2))"),
    ],
)
def test_what_all_jobs_have_is_told(told: Told, swept: tuple[str, ...]) -> None:
    assert told(*swept) == []
    assert told(*swept, "trainer.max_stps=4") == TYPO


@pytest.mark.parametrize(("swept", "value"), [("0.1", "0.1"), ("0.1,0.2", "VALUE"), ("range(1,4)", "VALUE")])
def test_a_swept_key_is_told_once_with_the_one_to_type(told: Told, swept: str, value: str) -> None:
    expected = f"model.lr: LanguageModel takes no lr; type optimizer.lr={value}"
    assert told("seed=1,2", f"model.lr={swept}") == [expected]


def test_what_no_job_reads_is_told_once(told: Told) -> None:
    own = ("model._target_=tests.engine.plain.PlainModel",)
    settings = "model.lr, model.width, model.dropout, model.eps, "
    line = f"optimizer.lr: PlainModel takes no optimizer; its arguments: {settings}"
    assert told("optimizer.lr=1e-3,1e-4", model=own) == [f"{line}model.halved"]
    assert told("optimizer=sgd,adamw", model=own) == [f"{line}model.halved".replace(".lr:", ":")]


def test_what_one_job_does_not_have_is_left_to_the_others(told: Told) -> None:
    assert told("trainer.max_stps=4", "optimizer.eps=x,1e-8") == TYPO
    assert told("optimizer.eps=x,1e-8,y") == []
    # the first and the last take no such option
    assert told("strategy=fsdp,ddp,fsdp_hybrid", "trainer.strategy.find_unused_parameters=true") == []
    assert told("+data.none=1", "data._target_=tests.engine.data.text.Text,tests.engine.data.none") == []


def test_a_value_that_all_jobs_sweep_is_not_missing(told: Told) -> None:
    model = LANGUAGE_MODEL[:1]
    lacking = ["model.optimizer: LanguageModel needs it; give model.optimizer=VALUE"]
    assert told("seed=1,2", model=model) == lacking
    assert told("model.optimizer=1,2", model=model) == []


def test_a_file_may_say_what_is_swept(told: Told, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    search = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: choice(2, x)\n"
    (tmp_path / "experiment/search.yaml").write_text(search)
    words = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=search")
    assert told(*words, "trainer.max_stps=4") == TYPO
    assert told(*words) == []


def test_classes_are_swept_as_any_other_value_is(tmp_path: Path) -> None:
    """Hydra leaves what is swept out of the sweep's own config, which names the folder."""
    classes = "model._target_=tests.engine.plain.PlainModel,tests.engine.plain.SGDModel"
    own = ["-m", classes, "data._target_=tests.engine.plain.PlainData"]
    asked = {"of all": [*own, "trainer.max_stps=4"], "beside a class": [*own, "model.wdth=4", "seed=x"]}
    found = {name: answer.err for name, answer in answers(asked, tmp_path).items()}
    assert found["of all"] == f"error: {TYPO[0]}\n"
    assert "seed=x" in found["beside a class"]
