"""A mistake that all jobs of a sweep have is told before the first; one that some of them have is theirs."""

from __future__ import annotations

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
from tests.night import at_night

OPTUNA = "hydra/sweeper=optuna hydra.sweeper.n_trials=2"
TYPO = "trainer.max_stps: Trainer takes no max_stps. Did you mean max_steps?"
LACKING = "model.optimizer: LanguageModel needs it; give model.optimizer=VALUE"
LANGUAGE, PLAIN = " ".join((*LANGUAGE_MODEL, TEXT)), "model._target_=tests.engine.plain.PlainModel"
INCOMPLETE = f"{LANGUAGE_MODEL[0]} {TEXT}"
UNREAD = "PlainModel takes no optimizer; its arguments: model.lr, model.width, model.dropout, model.eps, model.halved"


@pytest.mark.parametrize(
    ("typed", "told"),  # with nothing told, the mistakes are left to the jobs that have them
    [
        (f"{LANGUAGE} trainer.max_stps=4 optimizer.eps=x,1e-8", [TYPO]),
        (f"{LANGUAGE} optimizer.eps=x,1e-8,y", []),
        (f"{LANGUAGE} seed=1,2 model.lr=0.1", ["model.lr: LanguageModel takes no lr; type optimizer.lr=0.1"]),
        (f"{LANGUAGE} model.lr=0.1,0.2", ["model.lr: LanguageModel takes no lr; type optimizer.lr=VALUE"]),
        # the first and the last take no such option
        (f"{LANGUAGE} strategy=fsdp,ddp,fsdp_hybrid trainer.strategy.find_unused_parameters=true", []),
        *at_night(
            (f"{LANGUAGE} +data.none=1 data._target_=tests.engine.data.text.Text,tests.engine.data.none", []),
            (f"{LANGUAGE} seed=range(1,4) model.layers=choice(2,3) trainer.max_stps=4", [TYPO]),
            (f"{LANGUAGE} strategy=fsdp,ddp trainer.max_stps=4", [TYPO]),
            (f"{LANGUAGE} {OPTUNA} optimizer.lr=tag(log,interval(1e-4,1e-2)) trainer.max_stps=4", [TYPO]),
            (f"{LANGUAGE} {OPTUNA} optimizer.lr=tag(log,interval(1e-4,1e-2))", []),
            (f"{PLAIN} optimizer.lr=1e-3,1e-4", [f"optimizer.lr: {UNREAD}"]),
            (f"{PLAIN} optimizer=sgd,adamw", [f"optimizer: {UNREAD}"]),
            (f"{INCOMPLETE} seed=1,2", [LACKING]),  # what all jobs sweep is not missing
            (f"{INCOMPLETE} model.optimizer=1,2", []),
            (f"{LANGUAGE} hydra.searchpath=[file://TMP] experiment=search trainer.max_stps=4", [TYPO]),
            (f"{LANGUAGE} hydra.searchpath=[file://TMP] experiment=search", []),
        ),
    ],
)
def test_what_all_jobs_have_is_told_and_what_some_have_is_left_to_them(
    typed: str, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    search = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: choice(2, x)\n"
    (tmp_path / "experiment/search.yaml").write_text(search)
    assert _shared(*typed.replace("TMP", str(tmp_path)).split()) == told


def _shared(*typed: str) -> list[str]:
    words = normalised([*typed, "hydra.mode=MULTIRUN"])
    register_resolvers(placement.detect())
    try:
        with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            cfg = loader.load_configuration("config", words, RunMode.MULTIRUN)
            return shared_problems(cfg, partial(loader.load_sweep_config, cfg))
    finally:
        HydraConfig.instance().cfg = None


def test_a_sweep_is_refused_in_a_line_before_any_job(tmp_path: Path) -> None:
    plain = f"-m {PLAIN} data._target_=tests.engine.plain.PlainData run_id=x"
    rank = "TORCHELASTIC_RUN_ID=x RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    # of classes that are swept Hydra leaves the name out of the sweep's own config
    classes = "model._target_=tests.engine.plain.PlainModel,tests.engine.plain.SGDModel"
    expected = {
        f"{plain} {OPTUNA} seed=range(0,1000) trainer.max_stps=4": TYPO,
        f"{plain} {classes} trainer.max_stps=4": TYPO,
        f"{rank} MASTER_ADDR=localhost MASTER_PORT=29500 {plain} seed=1,2": "a sweep starts the processes of its jobs "
        "itself, but torchrun has started this process; type python train.py -m … with trainer.devices=N, or with "
        "hydra/launcher=submitit_slurm on a cluster",
        f"PATH=/nowhere {plain} hydra/launcher=submitit_slurm": "hydra/launcher=submitit_slurm: this machine has no "
        "sbatch; start the sweep on a machine of the cluster, or leave the launcher out",
    }
    found = answers({one: one.split() for one in expected}, tmp_path)
    assert {words: answer.err for words, answer in found.items()} == {
        words: f"error: {told}\n" for words, told in expected.items()
    }
    assert {answer.returncode for answer in found.values()} == {2}
    assert not [path for answer in found.values() for path in answer.left]
