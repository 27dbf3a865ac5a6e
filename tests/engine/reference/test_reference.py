"""What --help says: all that can be typed on one screen, and more of a group or a choice."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf.basecontainer import get_yaml_loader

from lightswitch.config.overrides import asks_for_help
from lightswitch.errors import RefusedRequest
from lightswitch.reference.choices import config, groups, help_text
from lightswitch.reference.schema import schemas
from tests.engine.conftest import CHECKOUT, PLAIN, Train
from tests.engine.tables import reference
from tests.engine.tables.documents import MEASURED
from tests.engine.tables.reference import COLUMNS, FILES, FILES_OF_SOME, NAMES, RECORDS, pages, sentences

TRAIN, CONF = CHECKOUT / "train.py", CHECKOUT / "conf"


def _text(about: str) -> str:
    return " ".join(help_text(about, TRAIN, CONF).split())


def test_all_of_it_fits_on_a_screen_and_leaves_out_no_group_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = help_text("", TRAIN, CONF).splitlines()
    assert len(lines) < 66
    assert max(map(len, lines)) <= 120
    first = {line.strip().partition("=")[0].partition(".")[0] for line in lines if line.startswith("  ")}
    assert {*groups(CONF), *(key.path for key in config(CONF).keys if "." not in key.path)} <= first
    assert "Other:" not in lines


def test_a_group_shows_its_choices_with_their_sentences() -> None:
    for group, choices in groups(CONF).items():
        shown = _text(group)
        for choice in choices:
            assert f"{group}={choice.name}" in shown
            assert " ".join(choice.sentence.split()) in shown


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--help optimizer=sgd", "optimizer.maximize=false"),  # of the code alone
        ("-h watch", "watch.lost_after_seconds=60 without a message from a rank; float or int"),
        ("--help seed", "seed=42 of initial weights, order of samples, augmentation and dropout; int"),
        ("--help optimizer.lr", "learning rate; float"),
        ("--help callbacks.last_checkpoint", "every_n_steps=250 optimizer steps between two checkpoints"),
        ("--help trainer.max_epochs", "Stop training once this number of epochs is reached; Optional[int]"),
    ],
)
def test_a_choice_a_node_or_a_key_is_told_by_itself(typed: str, told: str) -> None:
    assert told in _text(asks_for_help(typed.split()) or "")


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ("fsdp_tp", "there is no group and no key fsdp_tp. Did you mean strategy=fsdp_tp?"),
        ("optimizer.lrr", "there is no group and no key optimizer.lrr. Did you mean optimizer.lr?"),
        ("strategy=fdsp", "strategy has no fdsp. Did you mean fsdp?"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(about: str, told: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        _text(about)
    assert refused.value.problems == [f"--help {about}: {told}"]


def test_each_key_that_can_be_typed_has_a_sentence() -> None:
    """But for those of a device's sheet, of peft, and of fsdp_tp's plans, which are named by the model's class."""
    keys = [key for choice in (config(CONF), *itertools.chain(*groups(CONF).values())) for key in choice.keys]
    told = sentences()
    mute = {key.path for key in keys if not key.is_node and not key.name.startswith("_") and key.path not in told}
    unnamed = ("plan.device.", "model.lora.", "trainer.strategy.plans.")
    assert [path for path in mute if not path.startswith(unnamed)] == []


def test_each_page_is_made_and_is_no_file_of_git() -> None:
    measured = {path.stem for path in MEASURED.glob("*.md")}
    of_groups = {f"choices-{name.replace('/', '-')}" for name in groups(CONF)}
    assert {*pages()} == {f"reference/{name}.md" for name in (*NAMES, *of_groups, *measured)}
    assert "/docs/reference/" in (CHECKOUT / ".gitignore").read_text().splitlines()


def test_a_run_leaves_the_files_and_fields_of_the_page_and_no_other(train: Train) -> None:
    short = ("trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "strategy=single")
    run = train(*PLAIN, *short, "callbacks=[default,grad_norm,step_times]").run_dir
    left = [f"{path.relative_to(run)}{'/' * path.is_dir()}" for path in run.rglob("*") if path.name != "checkpoints"]
    assert not [name for name in FILES if not any(re.match(_pattern(name), path) for path in left)]
    told = [_pattern(name) for name in (*FILES, *FILES_OF_SOME)]
    assert not [path for path in left if not any(re.match(name, path) for name in told)]
    with (run / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    known = [_pattern(name) for name in COLUMNS if name != "<name>"]
    own = [column for column in columns if not any(re.fullmatch(name, column) for name in known)]
    assert own == ["val/accuracy", "val/loss", "test/accuracy", "test/loss"]  # what the module logs
    missing = [name for name in known if not any(re.fullmatch(name, column) for column in columns)]
    assert missing == ["world", "throughput/tokens_per_second"]  # it has not changed; samples are no sequences
    origin = json.loads((run / "run.json").read_text())
    written = {"run.json": origin, "starts of run.json": origin["starts"][0], "ended of run.json": origin["ended"]}
    for name, record in RECORDS:
        if name != "job.json":
            found = written.get(name) or json.loads((run / name).read_text())
            assert [*found] == [*record.__dataclass_fields__], name


def _pattern(name: str) -> str:
    """Return one of what a page says, where `<n>` stands for any text without a slash."""
    return re.sub(r"<\w+>", "[^/]+", re.escape(name))


def test_every_variable_of_the_page_is_named_in_the_code() -> None:
    paths = [*(CHECKOUT / "src" / "lightswitch").rglob("*.py"), *(CHECKOUT / "slurm").glob("*.sh")]
    code = "\n".join(path.read_text() for path in paths)
    told = (*reference.YOURS, *reference.OF_LAUNCHERS, *reference.SET)
    assert [name for name in told if not re.search(rf"\b{name}\b", code)] == []


# What an editor knows of conf


SCHEMAS = schemas(CONF)


def _at(group: str, path: str) -> dict[str, Any]:
    found = SCHEMAS[group]
    for name in path.split("."):
        found = found["properties"][name]
    return found


@pytest.mark.parametrize(
    ("group", "path", "about", "words"),
    [
        ("config", "on_nan", "when a loss is not finite", ["ignore", "stop"]),
        ("config", "watch.lost_after_seconds", "without a message from a rank", None),
        (
            "experiment",
            "trainer.max_epochs",
            "Stop training once this number of epochs is reached (Optional[int]",
            None,
        ),
        ("strategy", "strategy.sharding_strategy", "", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD", "SHARD_GRAD_OP"]),
        ("optimizer", "_target_", "", ["torch.optim.AdamW", "torch.optim.SGD"]),
        ("optimizer", "maximize", "(bool, False by default)", [False, True]),
    ],
)
def test_an_editor_completes_keys_and_words_and_explains_them(
    group: str, path: str, about: str, words: list[object] | None
) -> None:
    schema = _at(group, path)
    assert about in schema["description"]
    assert words is None or {*words} <= {*schema["examples"]}


def test_every_key_of_every_file_is_known() -> None:
    for schema in SCHEMAS.values():
        Draft7Validator.check_schema(schema)
    for path in CONF.rglob("*.yaml"):
        if "hydra" not in path.parts:
            group = "config" if path.parent == CONF else path.parent.name
            content = yaml.load(path.read_text(), get_yaml_loader()) or {}
            assert [*_unknown(SCHEMAS[group], content)] == [], path


def _unknown(schema: dict[str, Any], content: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that a schema lacks; a node of another group has none of its own."""
    for name, value in content.items():
        if name not in ("defaults", "hydra") and "properties" in schema:
            yield from [] if name in schema["properties"] else [name]
            yield from _unknown(schema["properties"].get(name, {}), value if isinstance(value, dict) else {})
