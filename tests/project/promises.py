"""Short runs of a model under each strategy, whether one is the same run as another, and what may differ."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from tests.project.choices import choices
from tests.project.witness import WITNESS, causes
from tests.runs import Finished, Train

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
STEPS, SAVED = 8, 4
TOLERANCE = 1e-5  # of a loss about 1: sums in another order differ by a tenth of it
SHORT = (
    *WITNESS,
    "global_batch_size=8",
    f"trainer.max_steps={STEPS}",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    f"trainer.val_check_interval={STEPS}",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=0",
    f"callbacks.last_checkpoint.every_n_steps={SAVED}",
)
_NOT_TRAINED = ("val", "test", "lr-", "throughput/", "memory/", "grad_norm")  # how the names of other metrics begin


class Runs:
    """The runs of every model under every strategy: each is made when it is asked for, and once."""

    def __init__(self, train: Train) -> None:
        self._train = train
        self._runs: dict[tuple[str, str], Finished] = {}
        self._data: dict[str, str] = {}

    def under(self, model: str, strategy: str) -> Finished:
        words, (arguments, ranks) = self._arguments(model), _spread(strategy)
        if (model, strategy) not in self._runs:
            self._runs[model, strategy] = self._train(*words, *arguments, ranks=ranks, check=False)
        return self._runs[model, strategy]

    def resumed(self, model: str, saver: str, reader: str) -> Finished:
        """Go on under `reader` from the checkpoint in the middle of the run under `saver`."""
        checkpoint = self.under(model, saver).run_dir / "checkpoints" / f"step_{SAVED}.ckpt"
        arguments, ranks = _spread(reader)
        return self._train(*self._arguments(model), *arguments, f"resume={checkpoint}", ranks=ranks, check=False)

    def _arguments(self, model: str) -> tuple[str, ...]:
        if model not in self._data:
            self._data[model] = self._find_data(model)
        return _words(model, self._data[model])

    def _find_data(self, model: str) -> str:
        """The first dataset that the model trains with, the default before the others; or the default."""
        for data in choices("data"):
            run = self._train(*_words(model, data), *_spread(ALONE)[0], check=False)
            if run.returncode == 0:
                self._runs[model, ALONE] = run
                return data
        return choices("data")[0]


def _words(model: str, data: str) -> tuple[str, ...]:
    return (f"model={model}", f"data={data}", *SMALLER.get(model, ()), *SHORT)


def _spread(strategy: str) -> tuple[tuple[str, ...], int]:
    """What to type for a strategy, and how many processes to start for it."""
    return (f"strategy={strategy}",), 1 if strategy == ALONE else 2


def refusal(run: Finished, strategy: str) -> str | None:
    """The line in which a strategy refuses a model, or what is not installed; None where it has trained.

    Raises:
        AssertionError: it has failed; or it refuses an example that every strategy takes.
    """
    told = run.err.strip().splitlines()[-1].removeprefix("error: ") if run.returncode == 2 else None
    is_required = strategy in FOR_EVERY_EXAMPLE and os.environ.get("LIGHTSWITCH_REQUIRE_ALL")
    assert run.returncode == 0 or (told and not is_required), run.out + run.err
    return told


def difference(run: Finished, base: Finished) -> str | None:
    """What differs first between the losses of each step of a run and those of another; None if nothing does."""
    for name in _trained(base):
        expected, found = base.column(name), run.column(name)
        for step, loss in found.items():
            if not abs(loss - expected[step]) <= TOLERANCE * max(1.0, abs(expected[step])):
                return f"at step {step} its {name} is {loss:.7g}, and not {expected[step]:.7g}"
    return None


def _trained(run: Finished) -> list[str]:
    """`train/loss`; of a module that optimizes by hand what it logs itself."""
    names = [name for name in run.metrics()[0] if name not in ("step", "samples", "epoch")]
    by_hand = [name for name in names if not name.startswith(_NOT_TRAINED)]
    return ["train/loss"] if "train/loss" in names else by_hand


def expected(alone: Finished) -> dict[str, str]:
    """What of the table the run of a model has shown: each cause with what was seen."""
    return {cause: seen for cause, seen in causes(alone.run_dir).items() if cause in EXPECTED}


def why(alone: Finished) -> str:
    """Why a curve depends on the number of devices or on a restart, as far as it was seen."""
    seen = "; ".join(causes(alone.run_dir).values())
    return seen or "no cause was seen: type mode=check, which looks further, or look at what the training step reads"


def listed(told: Mapping[str, str]) -> str:
    """Sentences about strategies, with those that share one together."""
    of_sentence: dict[str, list[str]] = {}
    for strategy, sentence in told.items():
        of_sentence.setdefault(sentence, []).append(strategy)
    return "; ".join(f"{', '.join(strategies)}: {sentence}" for sentence, strategies in of_sentence.items())


def pairs(savers: Sequence[str], is_expected_to_differ: bool) -> Iterator[tuple[str, str]]:
    """Which strategy resumes what which one has saved: the next one, or itself where devices change the curve."""
    yield from zip(savers, savers if is_expected_to_differ else [*savers[1:], savers[0]], strict=True)
