"""The command line as people type it."""

from __future__ import annotations

import pytest

from lightswitch.config.overrides import normalised, shortened


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
