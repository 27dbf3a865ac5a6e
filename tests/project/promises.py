"""The check of a model under each strategy, as mode=check makes it, and what may differ."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from lightswitch.checking.causes import Cause
from lightswitch.checking.check import SINGLE, Check
from lightswitch.checking.runs import Starter, Way
from lightswitch.checking.table import ELSEWHERE, RANKS, SAME_RUN, Cell, Found, as_text, lines
from tests.project.choices import choices
from tests.project.witness import WITNESS
from tests.runs import CHECKOUT

# What makes a model small enough to train a few steps in a second, as {"large": ("model.layers=2", "model.width=32")}
SMALLER: dict[str, tuple[str, ...]] = {
    "hf_causal_lm": (  # its layers are transposed; test_hf.py tunes a Llama
        "model.config={model_type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 32, n_layer: 2, n_head: 2, "
        "bos_token_id: null, eos_token_id: null}",
        "model.lora={r: 4, alpha: 8, target_modules: [c_attn, c_proj]}",
        "model.context=64",
    ),
}

# The table of promises. What makes the curve of any model follow the number of devices is expected, and no failure; it
# fails once its line is removed. A model with one of these still has to resume, by its own curve.
EXPECTED = (
    "batch norm",  # whose mean and variance are those of the samples of a device
    "noise by rank",  # that a training step draws, as the latents of a GAN; dropout is switched off here
)
# Models of yours that may break a promise, and why that is accepted, as {"simclr": "compares the samples of a device"}
ACCEPTED: dict[str, str] = {}

# By replicas, by torch's shards, by DeepSpeed's, by columns; the other strategies compute and save as one of these
ALONE, KINDS = "single", ("ddp", "fsdp", "deepspeed_stage_3", "fsdp_tp")
FOR_EVERY_EXAMPLE = ("ddp", "fsdp")
STEPS, DEVICES, GLOBAL_BATCH = 8, 2, 8
SHORT = (
    *WITNESS,
    f"global_batch_size={GLOBAL_BATCH}",
    f"trainer.max_steps={STEPS}",
    "trainer.accelerator=cpu",
    f"trainer.val_check_interval={STEPS}",
    "trainer.limit_val_batches=1",
    f"callbacks.last_checkpoint.every_n_steps={STEPS // 2}",
)


class Checks:
    """The check of every model: each is made when it is asked for, and once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starter = Starter(CHECKOUT / "train.py", ["tests.preload"], {"OMP_NUM_THREADS": "1"})
        self._found: dict[str, tuple[Check, Found]] = {}

    def of(self, model: str) -> tuple[Check, Found]:
        """Return a model's runs with the first dataset that it trains with, and what they show.

        Raises:
            AssertionError: it trains with none.
        """
        if model not in self._found:
            check = self._with_data(model)
            self._found[model] = check, check.briefly([way(kind) for kind in KINDS if kind in choices("strategy")])
        return self._found[model]

    def _with_data(self, model: str) -> Check:
        told = ""
        for data in choices("data"):
            words = (f"model={model}", f"data={data}", *SMALLER.get(model, ()), *SHORT)
            check = Check(self._starter, self._folder / model / data, words, STEPS, DEVICES, GLOBAL_BATCH)
            one = check.whole(SINGLE)
            if one.code == 0:
                return check
            told = told or one.output
        raise AssertionError(f"model={model} does not train on one device:\n{told}")


def way(strategy: str) -> Way:
    return SINGLE if strategy == ALONE else Way(strategy, (f"strategy={strategy}",), DEVICES)


def refusals(found: Found) -> dict[str, str]:
    """The line in which each strategy refuses a model, or says what is not installed.

    Raises:
        AssertionError: one refuses an example that every strategy takes.
    """
    told = {name: cells[0].told for name, cells in found.cells.items() if cells[0].status == "refused"}
    if os.environ.get("LIGHTSWITCH_REQUIRE_ALL"):
        assert not told.keys() & {*FOR_EVERY_EXAMPLE}, told
    return told


def expected(found: Found) -> dict[str, Cause]:
    """What of the table has shown itself, by the strategy that is another run for it."""
    return {name: cause for name, causes in found.causes.items() for cause in causes if cause.name in EXPECTED}


def broken(found: Found, promises: Collection[str]) -> list[str]:
    """The strategies that break one of some promises, and for no cause of the table."""
    of_table = expected(found)
    return [
        name
        for name, cells in found.cells.items()
        if any(cell.promise in promises for cell in _unexpected(cells, name in of_table))
    ]


def _unexpected(cells: Sequence[Cell], has_cause: bool) -> Iterator[Cell]:
    """What is broken, without what a cause of the table breaks: one process then goes on otherwise as well."""
    is_another = any(cell.is_broken and cell.promise in (*SAME_RUN, RANKS) for cell in cells)
    for cell in cells:
        of_cause = cell.status == "differs" and cell.promise in (*SAME_RUN, RANKS)
        of_another = cell.status == "differs" and cell.promise == ELSEWHERE
        if cell.is_broken and not (of_cause and has_cause) and not (of_another and is_another):
            yield cell


def told_of(check: Check, found: Found) -> str:
    """What differs, when it does first, why, and what to do; and the output of a run that failed."""
    failed = [name for name, cells in found.cells.items() if cells[0].status == "failed"]
    outputs = [check.whole(way(name)).output for name in failed]
    return "\n".join([as_text(found), "", *lines(found), *outputs])


def listed(told: Mapping[str, str]) -> str:
    """Sentences about strategies, with those that share one together."""
    of_sentence: dict[str, list[str]] = {}
    for strategy, sentence in told.items():
        of_sentence.setdefault(sentence, []).append(strategy)
    return "; ".join(f"{', '.join(strategies)}: {sentence}" for sentence, strategies in of_sentence.items())
