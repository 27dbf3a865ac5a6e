"""The command line as people type it."""

from __future__ import annotations

import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import OmegaConf

from lightswitch.checkpoints.portable import _renamed
from lightswitch.config import moved
from lightswitch.config.overrides import normalised, shortened
from tests.engine.conftest import PLAIN, Train


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


FLAGS = ("-m", "--multirun", "--cfg job", "-c job", "--config-dir mine", "--config-dir=mine")
CONSTRUCTED = ("model", "data", "trainer", "optimizer", "scheduler", "callbacks.x", "logger.x")
AS_TYPED = ("seed=1", "sead=1", "+seed=1", "~trainer.x", "hydra.run.dir=x", "model=my")
NORMALISED = {
    **{f"seed=1 {flag} strategy=ddp": f"{flag} seed=1 strategy=ddp" for flag in FLAGS},  # flags come first
    **{typed: typed for typed in ("-m seed=1,2", "--cfg job seed=1", *AS_TYPED)},
    # an argument of a constructor needs no plus, and may have one, as lightning-hydra-template asks for
    **{f"{plus}{group}.x=1": f"++{group}.x=1" for group in CONSTRUCTED for plus in ("", "+", "++")},
    # a replaced model leaves the arguments of the other behind, and an optimizer waits for the model to call it
    "model._target_=my.Model model.width=3": "~model ++model._target_=my.Model ++model.width=3",
    **{
        f"{group}._target_=my.X": f"~{group} ++{group}._partial_=true ++{group}._target_=my.X"
        for group in ("optimizer", "scheduler")
    },
    # a target beside a choice changes that choice, and other groups keep their file
    "model=mine model._target_=my.Model": "model=mine ++model._target_=my.Model",
    **{f"{group}._target_=my.X": f"++{group}._target_=my.X" for group in ("callbacks.mine", "trainer", "cluster")},
    **{f"precision={choice}": f"precision='{choice}'" for choice in ("16", "32", "true", "1.5")},  # it is a name
    **{f"{group}=null": f"~{group}" for group in ("debug", "experiment", "logger")},
    "--local-rank=1 seed=1": "seed=1",  # of torch.distributed.launch
}


@pytest.mark.parametrize("typed", NORMALISED)
def test_words_become_what_hydra_takes(typed: str) -> None:
    assert normalised(typed.split()) == NORMALISED[typed].split()


def test_spaces_and_quotes_stay_in_a_value() -> None:
    assert normalised(["data.files=[a b.txt,'c=d.txt']"]) == ["++data.files=[a b.txt,'c=d.txt']"]
    assert normalised(["-m", "precision=bf16-mixed, 16"]) == ["-m", "precision=bf16-mixed, '16'"]


@pytest.mark.parametrize("typed", ["trainer.max_steps=3", "seed=1", "++mine=1", "hydra.run.dir=runs/mine", "x='1/2 3'"])
def test_an_override_is_shown_as_it_is_typed(typed: str) -> None:
    assert shortened(*normalised([typed])) == typed
    assert shortened("hydra.run.dir='runs/mine'") == "hydra.run.dir=runs/mine"


def test_one_rank_of_a_launcher_writes_the_log_and_the_configuration() -> None:
    assert normalised(["seed=1"], rank=0) == ["seed=1"]
    assert normalised(["seed=1"], rank=1) == ["seed=1", "hydra.job_logging.root.handlers=[console]"]


def test_keys_of_a_dict_may_be_quoted_as_in_python_and_of_a_prefix_empty() -> None:
    typed = ['init_names={"": net.}', "model.names={'one': 1, \"two\": {'a.b': 2}}", "model.text='{\"a\": 1}'"]
    words = normalised(typed)
    parsed = [one.value() for one in OverridesParser.create().parse_overrides(words)]
    assert parsed == [{".": "net."}, {"one": 1, "two": {"a.b": 2}}, '{"a": 1}']
    assert _renamed("body.weight", parsed[0]) == "net.body.weight"


# A config of an older engine, which names code where it was, trains as it did and is told what to change


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The configs of commit c5ea3f9, byte for byte, in a fork that has changed nothing but its models and data."""
    return shutil.copytree(Path(__file__).with_name("older"), tmp_path / "conf")


def test_every_strategy_of_an_older_config_finds_its_code(older: Path) -> None:
    with initialize_config_dir(str(older), version_base="1.3"):
        composed = compose("config", overrides=["~model", "~data", "cluster=env"])
    for path in sorted((older / "strategy").glob("*.yaml")):
        cfg = deepcopy(composed)
        cfg.trainer.strategy = OmegaConf.load(path).strategy
        renamed = moved.replace(cfg)
        for node in (cfg.trainer.strategy, cfg.cluster):
            assert callable(get_object(node._target_))
        assert renamed["cluster"] == "lightswitch.launch.cluster.by_environment"
        assert "trainer.strategy" in renamed or not path.stem.startswith("deepspeed")


@pytest.mark.nightly
def test_an_older_config_trains_and_is_told_in_a_line(older: Path, train: Train) -> None:
    words = (*PLAIN, "strategy=deepspeed_stage_2", "trainer.max_steps=2", "global_batch_size=8")
    run = train(f"--config-path={older}", *words, ranks=2)
    (advice,) = re.findall("^advice .*$", run.out, re.MULTILINE)
    assert (
        "trainer.strategy._target_=lightswitch.strategies.deepspeed.DeepSpeed is now lightswitch.deepspeed." in advice
    )
    assert "test/loss" in run.out
    assert (run.run_dir / "train.log").stat().st_size


@pytest.mark.parametrize(
    "name", ["judged.BestCheckpoint", "judged.EarlyStop", "mlflow.MLflowRun", "profiler.NoProfiler"]
)
def test_each_class_that_moved_is_there(name: str) -> None:
    assert callable(get_object(moved.today(f"lightswitch.monitoring.{name}")))
