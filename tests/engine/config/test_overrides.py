"""The command line as people type it."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightswitch.checkpoints.portable import _renamed
from lightswitch.config.overrides import normalised, shortened


@pytest.fixture(autouse=True)
def _started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "flags",
    [("-m",), ("--multirun",), ("--cfg", "job"), ("-c", "job"), ("--config-dir", "mine"), ("--config-dir=mine",)],
)
def test_flags_come_first_with_their_values(flags: tuple[str, ...]) -> None:
    assert normalised(["seed=1", *flags, "strategy=ddp"]) == [*flags, "seed=1", "strategy=ddp"]


def test_a_flag_of_no_value_takes_none() -> None:
    assert normalised(["-m", "seed=1,2"]) == ["-m", "seed=1,2"]


def test_the_value_of_a_flag_is_no_flag_for_the_next_word() -> None:
    assert normalised(["--cfg", "job", "seed=1"]) == ["--cfg", "job", "seed=1"]


@pytest.mark.parametrize("group", ["model", "data", "trainer", "optimizer", "scheduler", "callbacks.x", "logger.x"])
def test_an_argument_of_a_constructor_needs_no_plus(group: str) -> None:
    for plus in ("", "+", "++"):  # as lightning-hydra-template asks for one, of what no file has
        assert normalised([f"{plus}{group}.anything=1"]) == [f"++{group}.anything=1"]


@pytest.mark.parametrize("argument", ["seed=1", "sead=1", "+seed=1", "~trainer.x", "hydra.run.dir=x", "model=my"])
def test_anything_else_stays_as_it_is(argument: str) -> None:
    assert normalised([argument]) == [argument]


@pytest.mark.parametrize("typed", ["trainer.max_steps=3", "seed=1", "++mine=1", "hydra.run.dir=runs/mine", "x='1/2 3'"])
def test_an_override_is_shown_as_it_is_typed(typed: str) -> None:
    assert shortened(*normalised([typed])) == typed
    assert shortened("hydra.run.dir='runs/mine'") == "hydra.run.dir=runs/mine"


def test_equals_signs_spaces_and_commas_stay_in_a_value() -> None:
    assert normalised(["data.files=[a b.txt,'c=d.txt']"]) == ["++data.files=[a b.txt,'c=d.txt']"]


def test_a_replaced_model_leaves_the_arguments_of_the_other_behind() -> None:
    assert normalised(["model._target_=my.Model", "model.width=3"]) == [
        "~model",
        "++model._target_=my.Model",
        "++model.width=3",
    ]


@pytest.mark.parametrize("group", ["optimizer", "scheduler"])
def test_a_replaced_optimizer_waits_for_the_model_to_call_it(group: str) -> None:
    assert normalised([f"{group}._target_=my.Thing"]) == [
        f"~{group}",
        f"++{group}._partial_=true",
        f"++{group}._target_=my.Thing",
    ]


def test_a_target_beside_a_choice_changes_that_choice() -> None:
    assert normalised(["model=mine", "model._target_=my.Model"]) == ["model=mine", "++model._target_=my.Model"]


@pytest.mark.parametrize("group", ["callbacks.mine", "trainer", "cluster"])
def test_other_groups_keep_their_file_under_another_target(group: str) -> None:
    assert normalised([f"{group}._target_=my.Thing"]) == [f"++{group}._target_=my.Thing"]


@pytest.mark.parametrize("choice", ["16", "32", "true", "1.5"])
def test_a_choice_that_reads_as_a_number_is_a_name(choice: str) -> None:
    assert normalised([f"precision={choice}"]) == [f"precision='{choice}'"]
    assert normalised(["-m", f"precision=bf16-mixed, {choice}"]) == ["-m", f"precision=bf16-mixed, '{choice}'"]


@pytest.mark.parametrize("group", ["debug", "experiment", "logger"])
def test_null_takes_a_group_away(group: str) -> None:
    assert normalised([f"{group}=null"]) == [f"~{group}"]


def test_one_rank_of_a_launcher_writes_the_log_and_the_configuration() -> None:
    assert normalised(["seed=1"], rank=0) == ["seed=1"]
    assert normalised(["seed=1"], rank=1) == ["seed=1", "hydra.job_logging.root.handlers=[console]"]


def test_the_flag_of_torch_distributed_launch_is_left_out() -> None:
    assert normalised(["--local-rank=1", "seed=1"]) == ["seed=1"]


def test_keys_of_a_dict_may_be_quoted_as_in_python_and_of_a_prefix_empty() -> None:
    typed = ['init_names={"": net.}', "model.names={'one': 1, \"two\": {'a.b': 2}}", "model.text='{\"a\": 1}'"]
    words = normalised(typed)
    parsed = [one.value() for one in OverridesParser.create().parse_overrides(words)]
    assert parsed == [{".": "net."}, {"one": 1, "two": {"a.b": 2}}, '{"a": 1}']
    assert _renamed("body.weight", parsed[0]) == "net.body.weight"
