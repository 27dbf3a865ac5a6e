"""Promise 1: every file of conf/ composes and makes what it names, and measured/matrix.md still holds on CPUs.

Requests are checked here in one process; strategies and precisions run in tours/.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightswitch.cluster.placement import Placement
from lightswitch.preflight import targets
from tests.engine import requests
from tests.engine.conftest import CHECKOUT, PLAIN, Train
from tests.engine.launch.witness import WITNESS, witnesses
from tests.engine.tables.matrix import CELLS, EXTRA, PRECISIONS, STRATEGIES
from tests.engine.tables.matrix import RUN as MATRIX_RUN
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


MADE = [("callbacks", choice, pl.Callback) for choice in choices("callbacks")]
MADE += [("logger", choice, pl.loggers.Logger) for choice in choices("logger")]
MADE += [("trainer", choice, pl.Trainer) for choice in choices("trainer")]
MADE += [("debug", choice, pl.Trainer) for choice in choices("debug")]
SLOW = [one for one in MADE if one[1] == "mlflow"]


@pytest.mark.parametrize(("group", "choice", "kind"), [*(one for one in MADE if one not in SLOW), *at_night(*SLOW)])
def test_every_choice_makes_what_it_names(
    group: str, choice: str, kind: type, composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"comet": "comet_ml"}.get(choice, choice)
    if choice in ("wandb", "mlflow", "comet") and importlib.util.find_spec(package) is None:
        required = choice == "mlflow" and os.environ.get("LIGHTSWITCH_REQUIRE_ALL") == "1"
        (pytest.fail if required else pytest.skip)(f"{choice} is an extra, and not installed here")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
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


TABLE = json.loads(CELLS.read_text())["cpu"]
PLACES = {  # the launcher's processes, and those asked for where there is none
    "one": (Placement("local"), 1),
    "two": (Placement("local"), 2),
    "torchrun": (Placement("torchrun", 1, 4), 4),
    "srun": (Placement("slurm", 2, 4), 4),
    "env": (Placement("env", 2, 2), 2),
}


def test_the_table_is_of_all_strategies_and_precisions() -> None:
    assert list(TABLE) == STRATEGIES
    assert all(tuple(row) == PRECISIONS for row in TABLE.values())


def test_nothing_fails_or_diverges() -> None:
    """A cell trains, or is refused by preflight; anything else would begin so."""
    odd = ("fails: ", "its loss is not finite")
    assert [found for row in TABLE.values() for found in row.values() if found.startswith(odd)] == []


def _refused_by_place(strategy: str, place: Placement, devices: int) -> set[str]:
    """At any precision."""
    nodes, starter = place.nodes, {"torchrun": "torchrun", "slurm": "srun"}.get(place.launcher)
    if strategy == "ddp_spawn" and starter:
        return {f"strategy=ddp_spawn starts the ranks itself, and {starter} has started them; use strategy=ddp"}
    if strategy == "ddp_spawn" and nodes > 1:
        return {f"strategy=ddp_spawn starts the ranks of one machine, not of {nodes} nodes; use strategy=ddp"}
    if strategy == "single" and nodes * devices > 1:
        return {f"strategy=single uses one device, but {nodes} × {devices} are requested; use strategy=ddp"}
    if strategy == "fsdp_hybrid" and devices < 2:
        return {"trainer.strategy.shard_size=2 does not divide 1 devices; use one of 1"}
    if strategy == "fsdp_tp" and devices < 2:
        told = "does not divide 1 × 1 devices; use trainer.devices=2 or a multiple of it"
        return {f"trainer.strategy.tensor_parallel_size=2 {told}"}
    return set()


BY_DAY = ("single", "ddp", "ddp_spawn", "fsdp", "fsdp_hybrid", "fsdp_tp", "deepspeed_stage_2")


@pytest.mark.parametrize("strategy", [*BY_DAY, *at_night(*(one for one in STRATEGIES if one not in BY_DAY))])
def test_a_request_is_accepted_or_refused_in_the_same_lines_by_any_launcher(strategy: str, tmp_path: Path) -> None:
    with requests.composing():
        asked = (f"strategy={strategy}", "trainer.accelerator=cpu", *EXTRA.get(strategy, ()))
        request = requests.composed(*MATRIX_RUN, *asked, into=tmp_path)
        for precision, found in TABLE[strategy].items():
            for name, (place, devices) in PLACES.items() if precision == PRECISIONS[0] else [("two", PLACES["two"])]:
                request.cfg.trainer.update(precision=precision, devices=devices)
                expected = _refused_by_place(strategy, place, devices) | {found} - {"trains"}
                assert requests.problems(request, place) == expected, f"{precision}, {name}"
