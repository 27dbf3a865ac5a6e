"""A config of an older engine, which names code where it was, trains as it did and is told what to change."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf

from lightswitch.config import moved
from tests.engine.conftest import CHECKOUT, PLAIN, Train


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The configs of commit c5ea3f9, byte for byte, in a fork that has changed nothing but its models and data."""
    return shutil.copytree(Path(__file__).with_name("older"), tmp_path / "conf")


def test_every_strategy_of_an_older_config_finds_its_code(older: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = SimpleNamespace(schema="file", path=str(older))
    told = 0
    with initialize_config_dir(str(older), version_base="1.3"):
        composed = compose("config", overrides=["~model", "~data", "cluster=env"])
    for path in sorted((older / "strategy").glob("*.yaml")):
        cfg = deepcopy(composed)
        cfg.trainer.strategy = OmegaConf.load(path).strategy
        choices = {"strategy": path.stem, "cluster": "env"}
        hydra = SimpleNamespace(runtime=SimpleNamespace(config_sources=[source], choices=choices))
        run = SimpleNamespace(placement=SimpleNamespace(rank=0), hydra=hydra)
        caplog.clear()
        with caplog.at_level("INFO"):
            moved.follow(cfg, run)
        for node in (cfg.trainer.strategy, cfg.cluster):
            assert callable(get_object(node._target_))
        (advice,) = (record.getMessage() for record in caplog.records)
        assert "conf/cluster/env.yaml names lightswitch.launch.cluster.by_environment, which moved to" in advice
        told += (
            "names lightswitch.strategies.deepspeed.DeepSpeed, which moved to lightswitch.deepspeed.strategy" in advice
        )
    assert told == len(list((older / "strategy").glob("deepspeed*.yaml")))


@pytest.mark.nightly
def test_an_older_config_trains_and_is_told_in_a_line(older: Path, train: Train) -> None:
    words = (*PLAIN, "strategy=deepspeed_stage_2", "trainer.max_steps=2", "global_batch_size=8")
    run = train(f"--config-path={older}", *words, ranks=2)
    (advice,) = re.findall("^advice .*$", run.out, re.MULTILINE)
    assert "conf/strategy/deepspeed_stage_2.yaml names" in advice
    assert "test/loss" in run.out
    assert (run.run_dir / "train.log").stat().st_size


def test_each_line_to_change_is_listed_and_todays_config_has_none(older: Path) -> None:
    lines = [*moved.in_folder(older)]
    detect = "lightswitch.launch.cluster.detect is now lightswitch.cluster.environments.detect"
    assert f"{older}/cluster/auto.yaml:2: {detect}" in lines
    for name in ("step_timer.NoProfiler", "trackers.MLflowRun"):
        assert any(line.endswith(f"is now lightswitch.monitoring.{name}") for line in lines), name
    assert [*moved.in_folder(CHECKOUT / "conf")] == []


@pytest.mark.parametrize(
    "name", ["judged.BestCheckpoint", "judged.EarlyStop", "mlflow.MLflowRun", "profiler.NoProfiler"]
)
def test_each_class_that_moved_is_there(name: str) -> None:
    assert callable(get_object(moved.today(f"lightswitch.monitoring.{name}")))
