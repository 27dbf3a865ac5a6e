"""mode=check, as a user types it: the table, check.json, the exit code, and what it says of what can't be checked."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightswitch.checking.check import KINDS, PROMISES, RESUMED, SINGLE, STARTS
from lightswitch.checking.comparison import Comparison, State, States
from lightswitch.checking.probe import END, Digest, merged, minus, norm, shards
from lightswitch.checkpoints.shards import Piece
from lightswitch.cluster.placement import Placement
from tests.engine.checking import modules
from tests.engine.checking.modules import check_of, way
from tests.engine.requests import composed, composing, problems
from tests.night import at_night
from tests.pool import Pool
from tests.runs import Finished, Train

DATA = ("data._target_=tests.engine.plain.PlainData", "data.samples=96", "global_batch_size=24")
CHECK = (*DATA, "mode=check", "run_id=mine", "trainer.devices=8")


def _module(name: str) -> str:
    return f"model._target_=tests.engine.checking.modules.{name}"


def _rows(finished: Finished) -> dict[str, list[str]]:
    """Return the words of each strategy's row of the table."""
    (found,) = re.findall(r"^(strategy .*\n(?:.+\n)+)\n", finished.out, re.MULTILINE)
    return {words[0]: words[1:] for words in map(str.split, found.splitlines())}


@pytest.mark.nightly
def test_what_differs_is_told_with_its_moment_and_cause(train: Train) -> None:
    finished = train(*CHECK, _module("Dice"), "check.strategies=[ddp]", "check.steps=2", check=False)
    data, rows = json.loads((finished.run_dir / "check.json").read_text()), _rows(finished)
    assert (finished.returncode, data["holds"], rows["ddp"][0]) == (1, False, "DIFFERS")
    assert re.search(r"^first      ddp: train/loss differs first, in the forward pass of step 1$", finished.out, re.M)
    assert "cause      ddp: loss over the local batch. one process with the micro batches" in finished.out
    assert {name: [*row["causes"]] for name, row in data["ways"].items()} == {"single": [], "ddp": [CAUSES["Dice"][1]]}


@pytest.mark.nightly
def test_a_good_module_keeps_all_promises(train: Train) -> None:
    finished = train(*CHECK, _module("Good"), "strategy=fsdp")
    rows, data = _rows(finished), json.loads((finished.run_dir / "check.json").read_text())
    assert list(rows) == ["strategy", "single", "fsdp"]
    assert rows["single"] == ["-"] * 4 + ["0", "0", "-", "yes"]
    assert "DIFFERS" not in finished.out
    assert "holds      8 steps, 2 devices: no promise is broken" in finished.out
    cells = {name: row["cells"] for name, row in data["ways"].items()}
    assert (data["holds"], [*cells], [*cells["fsdp"]]) == (True, ["single", "fsdp"], [*PROMISES])
    assert 0 < cells["fsdp"]["parameters"]["largest"] < 1e-5
    assert not list(finished.run_dir.glob("check_*")), "its runs are removed"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "words", "code", "told"),
    [
        (
            "Raises",
            "strategy=ddp",
            1,
            [
                'raise ValueError\\("the step of the user\'s own"\\)',
                "Raises fails in one process, before any strategy is tried: ValueError: the step",
            ],
        ),
        (
            "Good",
            "check.strategies=[single,ddp] trainer.max_steps=3",
            2,
            ["Good took 3 steps in one process, and check.steps=8; type a smaller check.steps, or give it longer data"],
        ),
    ],
)
def test_what_fails_or_can_not_be_checked_is_told(
    module: str, words: str, code: int, told: list[str], train: Train
) -> None:
    finished = train(*CHECK, _module(module), *words.split(), check=False)
    assert finished.returncode == code
    for line in told:
        assert re.search(line, finished.out + finished.err, re.MULTILINE), finished.out + finished.err


def test_a_mistake_is_told_before_anything_starts(tmp_path: Path) -> None:
    expected = {
        "check.steps=0": "check.steps=0: use a number from 2",
        "check.strategies=[ddp,fsdb]": "check.strategies: there is no strategy fsdb. Did you mean fsdp?",
    }
    with composing():
        for words, line in expected.items():
            (found,) = problems(composed(*CHECK[:-2], words, _module("Good"), into=tmp_path))
            assert found.startswith(line)
        (found,) = problems(composed("mode=check", into=tmp_path), Placement("torchrun", 1, 2))
    assert found.startswith("mode=check runs in a single process, but torchrun started several")
    assert found.endswith("; type python train.py mode=check check.devices=N")


# Digests are linear, whatever the shards, and say how far two tensors are apart; what is rounding is measured


def _digest(tensor: torch.Tensor) -> Digest:
    return shards({"it": tensor})["it"][2]


@pytest.mark.parametrize("shape", [(), (1025, 3), (1500, 1111)])
def test_the_norm_of_a_difference_is_estimated(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    apart = minus(_digest(one), _digest(other))
    assert norm(apart) == pytest.approx((one - other).norm().item(), rel=0.6)
    assert apart == pytest.approx(_digest(one - other), abs=1e-6)


def test_pieces_of_a_tensor_add_up_to_its_digest() -> None:
    whole = torch.randn(3000, 7)
    cuts = [0, 1, 1024, 5000, 5000, 20_999, 21_000]
    pieces = [Piece(whole.reshape(-1)[first:end].clone(), whole.shape, first) for first, end in pairwise(cuts)]
    digests = merged([shards({"it": piece}) for piece in pieces])
    assert digests["it"] == pytest.approx(_digest(whole), rel=1e-9)


def test_one_bit_is_seen() -> None:
    one, other = torch.ones(100), torch.ones(100)
    other[17] = torch.nextafter(other[17], torch.tensor(2.0))
    assert 0 < norm(minus(_digest(other), _digest(one))) < 1e-6
    assert norm(minus([math.nan], [math.nan])) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_has_a_digest(dtype: torch.dtype) -> None:
    one, other = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    other[2] = 0
    assert norm(minus(_digest(one), _digest(other))) == pytest.approx(1)


def _states(*values: float, loss: float = 1.0) -> States:
    return {
        (step, END): State({"model.w": _digest(torch.full((64,), value)), "logged.train/loss": [loss]})
        for step, value in enumerate(values)
    }


def _comparison(one: States, again: States, nudged: States) -> Comparison:
    return Comparison(one, again, lambda: nudged, ["model.w"])


def test_what_a_nudge_comes_to_is_rounding_and_a_weight_that_never_moves_is_not() -> None:
    one = _states(1.0, 1.001)
    steady = _comparison(one, one, _states(1 + 1e-6, 1.001 + 1e-6))
    chaotic = _comparison(one, one, _states(1 + 1e-6, 1.002))
    never_moved = _states(1.0, 1.0)
    (first,) = steady.of_kind("parameters", never_moved).differing
    assert (first.name, first.when) == ("w", "in a hook after the optimizer's step of step 1")
    assert first.relative == pytest.approx(1e-3, rel=0.01)
    assert not chaotic.of_kind("parameters", never_moved).differing
    assert not steady.of_kind("parameters", _states(1.0, 1.001 + 5e-7)).differing


def test_a_nudge_says_nothing_of_what_differs_between_equal_starts() -> None:
    one, again = _states(1.0, 1.5), _states(1.0, 1.2)
    comparison = _comparison(one, again, _states(1.0, 1.3))
    assert not comparison.is_repeated
    assert comparison.of_kind("parameters", again).differing


def test_what_is_not_finite_in_one_run_alone_differs() -> None:
    one = _states(1.0, 1.0)
    comparison = _comparison(one, one, one)
    assert comparison.of_kind("logged", _states(1.0, 1.0, loss=math.nan)).differing
    assert comparison.of_kind("parameters", _states(1.0, math.nan)).differing
    lost = _states(math.nan, math.nan, loss=math.nan)
    assert not _comparison(lost, lost, lost).of_kind("logged", lost).differing


# What differs first, at which moment, and the cause where the comparison itself shows it


CAUSES = {  # what differs first, and the name of the cause
    "Normed": (r".*net.1.running_mean.* differs first, in the forward pass of step 1", "batch norm"),
    "Dice": (r"train/loss differs first, in the forward pass of step 1", "loss over the local batch"),
    "Noisy": (r"train/loss differs first, in the forward pass of step 1", "noise by rank"),
    "ScaledByRank": (r"center differs first, in a hook after the optimizer's step of step 1", None),
    "Queued": (r"queue differs first, in the forward pass of step 1", None),
}
DAILY = ("Dice", "ScaledByRank")


@pytest.mark.parametrize("module", [*DAILY, *at_night(*(module for module in CAUSES if module not in DAILY))])
def test_what_differs_first_is_told_with_its_moment_and_what_shows_the_cause(
    module: str, pool: Pool, tmp_path: Path
) -> None:
    check = check_of(pool, tmp_path, getattr(modules, module))
    row, (first, cause) = check.row(way("ddp")), CAUSES[module]
    assert any(row.cells[kind].is_broken for kind in KINDS)
    assert re.fullmatch(first, row.first)
    assert [*row.causes] == ([cause] if cause else [])


@pytest.mark.parametrize(("module", "promise"), [(modules.Replaying, RESUMED), *at_night((modules.Unseeded, STARTS))])
def test_one_process_that_does_not_repeat_itself_is_told(
    module: type[pl.LightningModule], promise: str, pool: Pool, tmp_path: Path
) -> None:
    row = check_of(pool, tmp_path, module).row(SINGLE)
    assert next(one for one, cell in row.cells.items() if cell.status == "differs") == promise
    assert re.search(r"^net\.\d\.\w+ .*of step \d: ", row.cells[promise].reason)


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("deepspeed_stage_2", "ddp", "deepspeed_stage_3")])
def test_a_good_module_has_no_difference(strategy: str, pool: Pool, tmp_path: Path) -> None:
    row = check_of(pool, tmp_path, modules.Good).row(way(strategy))
    compared = {promise: cell for promise, cell in row.cells.items() if cell.largest is not None}
    assert [*compared] == ["logged", "parameters", "optimizer", STARTS, RESUMED, "in one"]
    assert all(cell.status == "holds" and cell.largest < 1e-5 for cell in compared.values())
