"""Promise 1: every switch works, or says at once why not."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster import placement
from lightswitch.config.overrides import normalised
from lightswitch.launch import resolvers
from lightswitch.launch.instantiation import plugins
from lightswitch.preflight import targets
from tests.engine.conftest import CHECKOUT, PLAIN, Train
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.tiny import LANGUAGE_MODEL, TEXT


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CHECKOUT / "conf" / group).glob("*.yaml"))


STRATEGIES = {  # on one device
    "ddp": ("DDP", "Scripts", None),
    "ddp_fork": ("DDP", "Workers", "fork"),
    "ddp_spawn": ("DDP", "Workers", "spawn"),
    "auto": ("Single", None, None),
    "single": ("Single", None, None),
    "fsdp": ("FSDP", "Scripts", None),
    "fsdp_grad_op": ("FSDP", "Scripts", None),
    "fsdp_hybrid": ("FSDP", "Scripts", None),
    "fsdp_offload": ("FSDP", "Scripts", None),
    "fsdp1": ("FSDP1", "Scripts", None),
}
# run by tests of their own
DEEPSPEED = [strategy for strategy in choices("strategy") if strategy.startswith("deepspeed")]
PRECISIONS_ON_CPU = ("32-true", "bf16-mixed", "bf16-true", "16-true", "64-true")


# Every file composes, is accepted by the code it names, and makes what it names.


class Composed:
    """Configs as train.py would get them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *overrides: str) -> DictConfig:
        fixed = ("run_id=composed", f"hydra.runtime.output_dir={self.folder}")
        cfg = compose("config", normalised([*LANGUAGE_MODEL, TEXT, *overrides, *fixed]), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        assert list(targets.problems(plain, plain.keys())) == []
        return cfg


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    resolvers.register(placement.detect())
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        yield Composed(tmp_path)
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("precision", PRECISIONS_ON_CPU)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *DEEPSPEED])
def test_every_strategy_makes_a_trainer_at_every_precision(strategy: str, precision: str, composed: Composed) -> None:
    own = ["trainer.strategy.config={zero_optimization:{stage:2}}"] if strategy == "deepspeed" else []
    cfg = composed(f"strategy={strategy}", *own, f"precision={precision}", "trainer.accelerator=cpu")
    trainer = instantiate(cfg.trainer, **plugins(cfg, None, []), _convert_="all")
    assert trainer.precision == precision
    assert type(trainer.strategy).__name__ == STRATEGIES.get(strategy, ("DeepSpeed",))[0]


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


@pytest.mark.parametrize("choice", choices("logger"))
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


# The switches of one run, for real


SHORT = (*PLAIN, *WITNESS, "run_id=mine", "trainer.max_steps=2", "trainer.val_check_interval=2")
SHORT += ("trainer.log_every_n_steps=1", "trainer.accelerator=cpu")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_strategy_in_use_is_the_one_asked_for(strategy: str, train: Train) -> None:
    name, launcher, start_method = STRATEGIES[strategy]
    run = train(*SHORT, f"strategy={strategy}")
    (seen,) = witnesses(run.run_dir)
    assert (seen["strategy"], seen["launcher"], seen["start_method"]) == (name, launcher, start_method)
    assert f"strategy   {name}, precision 32-true, 1 node × 1 CPU" in run.out.splitlines()


@pytest.mark.parametrize(
    "switches",
    [("strategy=single",), ("strategy=ddp_fork", "trainer.devices=2")],
    ids=["single", "ddp_fork"],
)
def test_every_precision_trains(switches: tuple[str, ...], train: Train) -> None:
    for precision in PRECISIONS_ON_CPU:
        # AdamW's usual eps of 1e-8 is 0 in float16
        run = train(*SHORT, *switches, "model.eps=1e-4", f"precision={precision}")
        assert {seen["precision"] for seen in witnesses(run.run_dir)} == {precision}
        first, second = run.column("train/loss").values()
        assert first == pytest.approx(1.5272, abs=0.01)
        assert math.isfinite(second)


def test_float16_autocast_is_refused_without_a_gpu(train: Train) -> None:
    refused = train(*SHORT, "precision=16-mixed", check=False)
    assert (refused.returncode, len(refused.err.splitlines())) == (2, 1)


@pytest.mark.gpu
def test_every_precision_trains_on_a_gpu(train: Train) -> None:
    run = [argument for argument in SHORT if argument != "trainer.accelerator=cpu"]
    for precision in choices("precision"):
        (seen,) = witnesses(train(*run, "model.eps=1e-4", f"precision={precision}").run_dir)
        assert seen["precision"] == precision


def test_every_strategy_is_among_those_tried() -> None:
    assert set(choices("strategy")) == {*STRATEGIES, *DEEPSPEED, "fsdp_tp"}  # on 2 devices or more
    assert set(choices("precision")) == {*PRECISIONS_ON_CPU, "16-mixed"}
