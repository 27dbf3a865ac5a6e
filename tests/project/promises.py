"""The check of a model under each strategy, as mode=check makes it, what may differ, and what frozen weights cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from lightswitch.checking.check import IN_ONE, KINDS, SINGLE, Check, Row, Way
from lightswitch.checking.runs import ShortRun
from tests.runs import CHECKOUT, Train

CONF = CHECKOUT / "conf"


def choices(group: str) -> list[str]:
    """Names of the files in a group, the default first."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    defaults = [dict(item) for item in OmegaConf.load(CONF / "config.yaml").defaults if item != "_self_"]
    return sorted(names, key=lambda name: {group: name} not in defaults)


def text(group: str, choice: str) -> str:
    return (CONF / group / f"{choice}.yaml").read_text()


def models() -> list[str]:
    """Those whose file names a class; one that changes another's sizes is tested as the other."""
    return [name for name in choices("model") if re.search(r"^_target_:", text("model", name), re.MULTILINE)]


# What makes a model small enough to train a few steps in a second, as {"large": ("model.layers=2", "model.width=32")}
SMALLER: dict[str, tuple[str, ...]] = {
    "hf_causal_lm": (  # its layers are transposed; test_hf.py tunes a Llama
        "model.config={model_type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 32, n_layer: 2, n_head: 2, "
        "bos_token_id: null, eos_token_id: null}",
        "model.lora={r: 4, alpha: 8, target_modules: [c_attn, c_proj]}",
        "model.context=64",
    ),
}

# Causes that make the curve of any model follow the number of devices. They are expected, and no failure; a model with
# one of these still has to resume, by its own curve.
EXPECTED = (
    "batch norm",  # whose mean and variance are those of the samples of a device
    "noise by rank",  # that a training step draws, as the latents of a GAN; dropout is switched off here
)
# Models of yours that may break a promise, and why that is accepted, as {"simclr": "compares the samples of a device"}
ACCEPTED: dict[str, str] = {}

# By replicas, by torch's shards, by DeepSpeed's, by columns; the other strategies compute and save as one of these
STRATEGIES = ("ddp", "fsdp", "deepspeed_stage_3", "fsdp_tp")
STEPS, DEVICES, GLOBAL_BATCH = 8, 2, 8
WITNESS = ("+callbacks.witness._target_=tests.project.promises.Witness",)
SHORT = (
    *WITNESS,
    f"global_batch_size={GLOBAL_BATCH}",
    f"trainer.max_steps={STEPS}",
    "trainer.accelerator=cpu",
    f"trainer.val_check_interval={STEPS}",
    "trainer.limit_val_batches=1",
    f"callbacks.last_checkpoint.every_n_steps={STEPS // 2}",
)


def check_of(model: str, folder: Path, train: Train) -> Check:
    """Return a check of a model with the first dataset that it trains with on one device."""
    outputs = []
    for data in choices("data"):
        words = (f"model={model}", f"data={data}", *SMALLER.get(model, ()), *SHORT)
        start = partial(_start, train)
        check = Check(start, folder / data, words, STEPS, lambda devices: GLOBAL_BATCH // devices)
        if check.run(SINGLE).code == 0:
            return check
        outputs.append(check.run(SINGLE).output)
    raise AssertionError(f"model={model} does not train on one device:\n{outputs[0]}")


def _start(train: Train, folder: Path, words: Sequence[str]) -> ShortRun:
    devices = next(int(word.partition("=")[2]) for word in words if word.startswith("trainer.devices="))
    run = train(*words, ranks=devices if devices > 1 else 0, check=False)
    return ShortRun(run.returncode, run.out + run.err, folder)


def rows_of(check: Check) -> dict[str, Row]:
    """Return what the check finds in one process and under each kind of strategy."""
    ways = [Way(name, (f"strategy={name}",), DEVICES) for name in STRATEGIES if name in choices("strategy")]
    return {way.name: check.row(way) for way in (SINGLE, *ways)}


def broken(row: Row) -> list[str]:
    """Return the promises that a row breaks, without those of an expected cause: one process then differs as well."""
    follows = (*KINDS, IN_ONE) if {*row.causes} & {*EXPECTED} else ()
    return [
        name
        for name, cell in row.cells.items()
        if cell.is_broken and not (cell.status == "differs" and name in follows)
    ]


class Witness(Callback):
    """Switches dropout off, whose masks differ with the number of devices, and fails if frozen weights cost memory."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):  # as in nn.MultiheadAttention and nn.LSTM
                module.dropout = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A rank has no gradient of a frozen parameter, and at most Adam's two averages of all that is trained."""
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])  # DeepSpeed's has another within
        states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in states if one.ndim)
        trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        assert held <= 2 * elements + 64, f"the optimizer holds {held} elements for {elements} trained ones"  # padding
        frozen = [name for name, one in pl_module.named_parameters() if not one.requires_grad and one.grad is not None]
        assert not frozen, f"frozen parameters have gradients: {frozen}"
