"""Promise 1: every file of conf/ composes, is accepted by the code that it names, and makes what it names.

Strategies and precisions run in tours/, and are refused in test_matrix.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightswitch.preflight import targets
from tests.engine import requests
from tests.engine.conftest import CHECKOUT, PLAIN, Train
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.tiny import LANGUAGE_MODEL, TEXT
from tests.night import at_night

Composed = Callable[..., DictConfig]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml"))


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    def accepted(*words: str) -> DictConfig:
        cfg = requests.composed(*LANGUAGE_MODEL, TEXT, *words, into=tmp_path).cfg
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert list(targets.problems(plain, plain.keys())) == []
        return cfg

    with requests.composing():
        yield accepted


@pytest.mark.parametrize("optimizer", choices("optimizer"))
@pytest.mark.parametrize("scheduler", choices("scheduler"))
def test_every_optimizer_goes_with_every_scheduler(optimizer: str, scheduler: str, composed: Composed) -> None:
    cfg = composed(f"optimizer={optimizer}", f"scheduler={scheduler}")
    model = instantiate(cfg.model, _convert_="all")
    model.configure_model()
    made = model.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.Optimizer)
    assert isinstance(made["lr_scheduler"]["scheduler"], torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.parametrize("choice", choices("callbacks"))
def test_every_callback_is_made(choice: str, composed: Composed) -> None:
    made = instantiate(composed(f"callbacks={choice}").callbacks, _convert_="all")
    assert made
    assert all(isinstance(callback, pl.Callback) for callback in made.values())


@pytest.mark.parametrize("choice", [*(name for name in choices("logger") if name != "mlflow"), *at_night("mlflow")])
def test_every_logger_is_made(choice: str, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"wandb": "wandb", "mlflow": "mlflow"}.get(choice)
    if needs and importlib.util.find_spec(needs) is None:
        required = needs == "mlflow" and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(f"{needs} is an extra, and not installed here")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = instantiate(composed(f"logger={choice}").logger, _convert_="all")
    assert made
    assert all(isinstance(logger, pl.loggers.Logger) for logger in made.values())


@pytest.mark.parametrize("choice", choices("trainer"))
def test_every_trainer_is_made(choice: str, composed: Composed) -> None:
    assert isinstance(instantiate(composed(f"trainer={choice}").trainer, _convert_="all"), pl.Trainer)


@pytest.mark.parametrize("choice", choices("cluster"))
def test_every_cluster_is_accepted(choice: str, composed: Composed) -> None:
    by_hand = ["cluster.node_rank=0", "cluster.main_address=localhost"] if choice == "manual" else []
    assert composed(f"cluster={choice}", *by_hand).cluster


@pytest.mark.parametrize("choice", choices("debug"))
def test_every_debug_choice_makes_a_trainer(choice: str, composed: Composed) -> None:
    assert isinstance(instantiate(composed(f"debug={choice}").trainer, _convert_="all"), pl.Trainer)


SHORT = (*PLAIN, *WITNESS, "run_id=mine", "trainer.max_steps=2", "trainer.val_check_interval=2")


@pytest.mark.gpu
def test_every_precision_trains_on_a_gpu(train: Train) -> None:
    for precision in choices("precision"):
        (seen,) = witnesses(train(*SHORT, "model.eps=1e-4", f"precision={precision}").run_dir)
        assert seen["precision"] == precision
