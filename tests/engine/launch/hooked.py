"""A module, data and a callback that have every hook of Lightning's, and note each call of one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from tests.engine.plain import PlainData, PlainModel

Call = tuple[str, str, str | None, str]  # whose, which, the name that `self.log` would know, the arguments' types
Pair = list[Tensor]


class Logging(PlainModel):
    """Logs for the bar and the loggers, in some batches, as a step's value, an epoch's and a metric."""

    def training_step(self, batch: Pair, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean_loss(loss.detach())
        if batch_idx % 2:
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/both", loss, on_step=True, on_epoch=True)
            self.log("train/mean", self.mean_loss)
        return {"loss": loss, "size": len(batch[0])}


class WithoutIndex(PlainModel):
    def training_step(self, batch: Pair) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


class TwoOptimizers(PlainModel):
    """Steps by hand: one optimizer in each batch, the other in every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Pair, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step(lambda: nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.log("train/loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[3]]
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers], []


class Skipping(PlainModel):
    def training_step(self, batch: Pair, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class EndingEpochs(PlainModel):
    def on_train_batch_start(self, batch: Pair, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class TakingTheIterator(PlainModel):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Failing(PlainModel):
    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("in the third batch")
        return super().training_step(batch, batch_idx)


class Shown(Callback):
    """Notes what the bar, callbacks and loggers are shown after each batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer)

    def _note(self, trainer: Trainer) -> None:
        shown = {kind: getattr(trainer, f"{kind}_metrics") for kind in ("progress_bar", "callback", "logged")}
        self.seen.append({kind: {name: float(value) for name, value in of.items()} for kind, of in shown.items()})


def calls(model: type[PlainModel], folder: Path, arrange: Callable[[Trainer], None], **arguments: Any) -> list[Call]:
    """Return the calls of hooks in a fit and a test, in order."""
    seen: list[Call] = []
    seed_everything(1, verbose=False)
    module = with_every_hook(model, LightningModule, "module", seen)()
    data = with_every_hook(PlainData, LightningDataModule, "data", seen)()
    callback = with_every_hook(Callback, Callback, "callback", seen)()
    trainer = trained_by(folder, [callback], max_epochs=2, **arguments)
    arrange(trainer)
    try:
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
    except ZeroDivisionError as error:
        seen.append(("trainer", str(error), module._current_fx_name, ""))
    return seen


def with_every_hook(base: type, declared_by: type, owner: str, seen: list[Call]) -> Any:
    names = [name for name in dir(declared_by) if name.startswith(("on_", "optimizer_", "lr_scheduler_"))]
    names += ["configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers"]
    names += ["setup", "teardown", "training_step", "validation_step", "test_step", "predict_step", "backward"]
    if owner == "data":
        names += [
            "prepare_data",
            "state_dict",
            *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
        ]
    transfers = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
    names = [name for name in names if name not in transfers] + (transfers if owner == "data" else [])
    hooks = {name: getattr(base, name) for name in names if callable(getattr(base, name, None))}

    def told(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = args[1] if owner == "callback" else self.trainer.lightning_module if owner == "data" else self
            kinds = " ".join([*(type(value).__name__ for value in args), *sorted(kwargs)])
            seen.append((owner, name, module._current_fx_name, kinds))
            return hook(self, *args, **kwargs)

        tell.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]  # does a step take the batch's index?
        return tell

    return type(base.__name__, (base,), {name: told(name, hook) for name, hook in hooks.items()})


class Lines(list[Call]):
    """Calls that are written to the rank's file in the working directory, a line each, for runs in other processes."""

    def append(self, call: Call) -> None:
        with Path(f"hooks_{rank_zero_only.rank}.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")


def trained_by(folder: Path, callbacks: list[Callback], **arguments: Any) -> Trainer:
    """Return a Trainer of four batches an epoch, with nothing that would be drawn or written."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits = {"limit_train_batches": 4, "limit_val_batches": 2, "limit_test_batches": 2, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", callbacks=callbacks, default_root_dir=folder, **{**quiet, **limits, **arguments})


def told_to(seen: list[Call]) -> tuple[Any, Any, Any]:
    """Return classes of a module, data and a callback that note the calls of their hooks."""
    model = with_every_hook(Logging, LightningModule, "module", seen)
    data = with_every_hook(PlainData, LightningDataModule, "data", seen)
    return model, data, with_every_hook(Callback, Callback, "callback", seen)


WRITTEN = told_to(Lines())
Model = WRITTEN[0]
Data = WRITTEN[1]
Teller = WRITTEN[2]
