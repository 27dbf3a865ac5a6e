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


@pytest.mark.parametrize("scheduler", choices("scheduler"))
def test_every_optimizer_goes_with_every_scheduler(scheduler: str, composed: Composed) -> None:
    for optimizer in choices("optimizer"):
        cfg = composed(f"optimizer={optimizer}", f"scheduler={scheduler}")
        model = instantiate(cfg.model, _convert_="all")
        model.configure_model()
        made = model.configure_optimizers()
        assert isinstance(made["optimizer"], torch.optim.Optimizer), optimizer
        assert isinstance(made["lr_scheduler"]["scheduler"], torch.optim.lr_scheduler.LRScheduler), optimizer


MADE = [("callbacks", choice, pl.Callback) for choice in choices("callbacks")]
MADE += [("logger", choice, pl.loggers.Logger) for choice in choices("logger")]
MADE += [("trainer", choice, pl.Trainer) for choice in choices("trainer")]
MADE += [("debug", choice, pl.Trainer) for choice in choices("debug")]
SLOW = [one for one in MADE if one[1] == "mlflow"]


@pytest.mark.parametrize(("group", "choice", "kind"), [*(one for one in MADE if one not in SLOW), *at_night(*SLOW)])
def test_every_choice_makes_what_it_names(
    group: str, choice: str, kind: type, composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice in ("wandb", "mlflow") and importlib.util.find_spec(choice) is None:
        required = choice == "mlflow" and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(f"{choice} is an extra, and not installed here")
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = composed(f"{group}={choice}")
    made = instantiate(cfg.trainer if group == "debug" else cfg[group], _convert_="all")
    assert made
    assert all(isinstance(one, kind) for one in (made.values() if isinstance(made, dict) else [made]))


@pytest.mark.parametrize("choice", choices("cluster"))
def test_every_cluster_is_accepted(choice: str, composed: Composed) -> None:
    by_hand = ["cluster.node_rank=0", "cluster.main_address=localhost"] if choice == "manual" else []
    assert composed(f"cluster={choice}", *by_hand).cluster


SHORT = (*PLAIN, *WITNESS, "run_id=mine", "trainer.max_steps=2", "trainer.val_check_interval=2")


@pytest.mark.gpu
def test_every_precision_trains_on_a_gpu(train: Train) -> None:
    for precision in choices("precision"):
        (seen,) = witnesses(train(*SHORT, "model.eps=1e-4", f"precision={precision}").run_dir)
        assert seen["precision"] == precision
