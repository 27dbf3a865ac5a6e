"""Promise 1: every switch works, or says at once why not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightswitch.launch import resolvers
from tests.conftest import CHECKOUT, PLAIN, Train

CONF = CHECKOUT / "conf"
NEEDS = {"data=text": "data.files=[README.md]", "data=tokens": "data.folder=.", "data=fashion_mnist": "data.folder=."}
EXTRAS = {"mlflow": "mlflow", "wandb": "wandb"}


def choices(*groups: str) -> list[str]:
    return [f"{group}={path.stem}" for group in groups for path in sorted((CONF / group).glob("*.yaml"))]


def composed(tmp_path: Path, *overrides: str) -> DictConfig:
    resolvers.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*overrides, f"hydra.run.dir={tmp_path}"], return_hydra_config=True)
    OmegaConf.set_struct(cfg, False)
    cfg.hydra.runtime.output_dir = str(tmp_path)
    HydraConfig.instance().set_config(cfg)
    del cfg.hydra
    return cfg


@pytest.mark.parametrize("choice", choices("experiment", "debug", "data", "trainer", "cluster"))
def test_every_choice_composes_and_resolves(choice: str, tmp_path: Path) -> None:
    more = {"cluster=manual": ["cluster.node_rank=0", "cluster.main_address=node1"]}
    needed = [NEEDS[choice]] if choice in NEEDS else more.get(choice, [])
    model = ["model=vit"] if choice in ("data=digits", "data=fashion_mnist") else []
    cfg = composed(tmp_path, choice, *model, *needed)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize("choice", choices("model", "optimizer", "scheduler"))
def test_every_model_optimizer_and_scheduler_is_built(choice: str, tmp_path: Path) -> None:
    data = ["data=digits"] if choice == "model=vit" else []
    cfg = composed(tmp_path, choice, *data)
    with torch.device("meta"):  # 6.7 billion parameters take no room there
        model = instantiate(cfg.model, _convert_="all")
        model.configure_optimizers()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e5


@pytest.mark.parametrize("choice", [c for c in choices("logger", "callbacks") if "default" not in c])
def test_every_logger_and_callback_is_built(choice: str, tmp_path: Path) -> None:
    group, name = choice.split("=")
    extra = EXTRAS.get(name)
    if extra and not importlib.util.find_spec(extra):
        assert extra != "mlflow" or "LIGHTSWITCH_REQUIRE_ALL" not in os.environ
        pytest.skip(f"{extra} is an extra and is not installed")
    cfg = composed(tmp_path, f"{group}=[{name}]")
    assert all(instantiate(node, _convert_="all") is not None for node in cfg[group].values())


PRECISIONS = [path.stem for path in sorted((CONF / "precision").glob("*.yaml"))]
STRATEGIES = {
    "auto": "SingleDeviceStrategy",
    "single": "Single",
    "ddp_fork": "DDPStrategy",
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_and_precision_train_together_or_are_refused_in_a_line(
    strategy: str, precision: str, train: Train
) -> None:
    run = train(
        *PLAIN, f"strategy={strategy}", f"precision={precision}", "trainer.accelerator=cpu", "trainer.max_steps=2",
        f"trainer.devices={2 if strategy == 'ddp_fork' else 1}", check=False,
    )  # fmt: skip
    if precision == "16-mixed":
        assert run.returncode == 2
        assert run.err.startswith("error: precision=16-mixed is for GPUs")
        assert run.err.count("\n") == 1
    else:
        assert run.returncode == 0, run.err
        assert f"strategy   {STRATEGIES[strategy]}, precision {precision}," in run.out


@pytest.mark.parametrize("choice", ["limit", "overfit", "profiler", "anomaly", "one_batch"])
def test_every_debug_choice_runs(choice: str, train: Train) -> None:
    run = train(*PLAIN, f"debug={choice}", "trainer.max_steps=4")
    if choice == "profiler":
        assert (run.run_dir / "fit-profile.txt").exists()


def test_any_argument_callback_and_logger_can_be_switched_from_the_command_line(train: Train) -> None:
    run = train(
        *PLAIN, "~callbacks.throughput", "callbacks=[default,early_stopping,grad_norm]", "~logger.tensorboard",
        "trainer.limit_val_batches=2", "trainer.max_steps=10", "trainer.val_check_interval=5",
    )  # fmt: skip
    assert not (run.run_dir / "tensorboard").exists()
    assert run.column("grad_norm")
    assert not any("throughput" in name for name in run.metrics()[0])


def test_an_optimizer_and_its_rate_are_replaced_from_the_command_line(train: Train) -> None:
    small = ("model.layers=1", "model.width=16", "trainer.max_steps=2", "trainer.limit_test_batches=1")
    run = train(
        *small, "optimizer._target_=torch.optim.SGD", "optimizer.lr=0.1", "scheduler=constant",
        "lr_scaling.rule=linear", "global_batch_size=128", "trainer.log_every_n_steps=1",
    )  # fmt: skip
    assert "learning rate 0.1 tuned at a global batch of 64 becomes 0.2 at 128 (linear rule)" in run.out
    assert any(name.startswith("lr-SGD") for name in run.metrics()[0])


def test_a_checkpoint_is_evaluated_without_training(train: Train) -> None:
    run = train(*PLAIN, "trainer.max_steps=20", "trainer.val_check_interval=10")
    best = f"ckpt_path={run.run_dir / 'checkpoints' / 'best.ckpt'}"
    tested = train(*PLAIN, "mode=test", best)
    assert tested.column("test/loss") == run.column("test/loss")
    validated = train(*PLAIN, "mode=validate", best, "strategy=ddp_fork", "trainer.devices=2")
    assert min(run.column("val/loss").values()) == pytest.approx(*validated.column("val/loss").values(), abs=1e-5)
    predicted = train(*PLAIN, "mode=predict", best, "strategy=ddp_fork", "trainer.devices=2")
    shares = [torch.load(path) for path in sorted(predicted.run_dir.glob("predictions/rank_*.pt"))]
    assert sum(len(batch) for share in shares for batch in share) == 41
