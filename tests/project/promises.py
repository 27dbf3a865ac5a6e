"""Short runs of a model under each strategy, and whether one has the curve of another."""

from __future__ import annotations

from tests.project.choices import choices, models
from tests.project.witness import WITNESS, reasons
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
# What models after the first are tried under; the other strategies save and compute as one of these
_OF_EACH_KIND = (
    *("single", "ddp", "fsdp", "fsdp_grad_op", "fsdp1"),
    *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
)
UNDER: dict[str, tuple[str, ...]] = dict.fromkeys(models()[1:], _OF_EACH_KIND)
# Models that may break a promise, and why that is accepted, as {"resnet": "batch norm, as in the paper"}
ACCEPTED: dict[str, str] = {}
ALONE = "single"
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


def assert_same_curve(name: str, under: str, run: Finished, alone: Finished) -> None:
    """Compare the loss of each step of `run` with that of `alone`, on one device and without a break.

    Raises:
        AssertionError: they differ; with the promise that this breaks, both values and, where it was seen, why.
    """
    expected, found = alone.column("train/loss"), run.column("train/loss")
    assert found, f"{name} logged no train/loss under {under}"
    for step, loss in found.items():
        if not abs(loss - expected[step]) <= TOLERANCE * max(1.0, abs(expected[step])):
            raise AssertionError(
                f"{name} breaks the promise that {_promise(run)}: at step {step} its train/loss is {loss:.7g} under "
                f"{under}, and {expected[step]:.7g} on one device without a break. Why: "
                + ("; ".join(reasons(alone.run_dir)) or "no cause was seen; look at what its training step reads")
            )


def _promise(run: Finished) -> str:
    if "resumes " in run.out:
        return "a resumed run goes on as if it had not been interrupted"
    return "strategy and number of devices do not change the run"
