"""torch.compile of a model from outside, so that every parameter keeps its name, and recompilations told."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._logging import _internal as torch_logs

from lightswitch import patches
from lightswitch.errors import Refused, nearest
from lightswitch.strategies.units import find_units

log = logging.getLogger(__name__)
_EXPECTED = 4  # of a function: without gradients, in inference mode, for a smaller last batch, and for any batch


class Compilation(Callback):
    """Callback that compiles a model once it is built, and before a strategy shards it.

    Random numbers are drawn as without it, so that it changes a run by rounding alone.

    Args:
        scope: units, the model's repeated blocks, which share one compilation, and its losses; or whole, the training
            step as one, in which case evaluation is not compiled.
        units: class names or paths, in place of the repeated blocks and losses.
        backend: of torch.compile.
        mode: of its backend inductor.
        dynamic: compile for any shape at once; None, only for shapes that turn out to change.

    Raises:
        ValueError: torch knows no such backend.
    """

    def __init__(
        self,
        scope: Literal["units", "whole"] = "units",
        units: list[str] | None = None,
        backend: str = "inductor",
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
    ) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compile.backend={backend}: torch knows no such backend.{nearest(backend, known)}")
        self.scope, self.units, self.backend, self.mode, self.dynamic = scope, units, backend, mode, dynamic
        self._is_done = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._is_done:  # in a test after fit
            return
        if is_overridden("configure_model", pl_module):
            patches.call_after(pl_module, "configure_model", partial(self._compile, trainer, pl_module))
        else:
            self._compile(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._begin_generation()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop.epoch_loop._should_accumulate():
            self._begin_generation()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_generation()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_generation()

    def _begin_generation(self) -> None:
        """Let CUDA graphs use the memory again of what they have returned so far: activations, and gradients as well.

        Between two micro batches of a step, these are still needed. Where nothing is said, torch takes each call of a
        compiled unit for such a beginning, also where it reads what the unit before has returned.
        """
        if self.mode in ("reduce-overhead", "max-autotune"):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's

    def _compile(self, trainer: Trainer, model: LightningModule) -> None:
        self._is_done = True
        units = find_units(model, self.units) if self.scope == "units" else {}
        if getattr(trainer.strategy, "zero_stage_3", False):
            _check_gathered(units)
        if units and self.units is None:
            units |= _losses(model)
        if units:  # as one, the training step is cut, so that gradients are sent while others are computed
            patches.replace(torch._dynamo.config, "optimize_ddp", False)
        for unit in units.values():
            patches.replace(unit, "forward", CompiledForward(unit, self._arguments))
        if not units:
            patches.replace(model, "training_step", torch.compile(model.training_step, **self._arguments))
        if trainer.is_global_zero:
            tell_recompilations()
            log.info("compiles   %s by %s", _described(units.values()), self.backend)

    @property
    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"backend": self.backend, "dynamic": self.dynamic}
        if self.backend == "inductor":
            from torch._inductor import list_mode_options

            # by its own generator, dropout would drop other units than without compilation
            arguments["options"] = {**list_mode_options(self.mode, self.dynamic), "fallback_random": True}
        return arguments


class CompiledForward:
    """The compiled forward pass of a module, whose hooks run outside of it: some gather parameters.

    A copy of the module has the class's own.
    """

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self._module = module
        self._forward = torch.compile(module.forward, **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return MethodType, (type(self._module).forward, self._module)


def _check_gathered(units: Mapping[str, nn.Module]) -> None:
    """Check that units hold their parameters in parts of theirs, where DeepSpeed's stage 3 gathers them in time.

    Raises:
        Refused: one holds some itself; its backward pass would find them empty.
    """
    own = [path for path, unit in units.items() if any(True for _ in unit.parameters(recurse=False))]
    if own:
        raise Refused(
            f"compile=true: {own[0]} is a {type(units[own[0]]).__name__}, which holds parameters itself, and "
            "DeepSpeed's stage 3 gathers none for its compiled backward pass; type compile.units=[NAME] of blocks, "
            "compile=false, or strategy=fsdp"
        )


def _losses(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are losses, as `nn.CrossEntropyLoss()`: in eager mode, that of a language model reads and
    writes its logits ten times."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.modules.loss._Loss)}


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a unit that is compiled."""
    return isinstance(vars(module).get("forward"), CompiledForward)


def _described(units: Iterable[nn.Module]) -> str:
    kinds = Counter(type(unit).__name__ for unit in units)
    return ", ".join(f"{count} {name}" for name, count in kinds.items()) or "the training step"


def tell_recompilations() -> None:
    """Log each recompilation of a function after the first few, from now on.

    Where TORCH_LOGS is set, torch logs what that asks for, and nothing else.
    """
    if "TORCH_LOGS" in os.environ:
        return
    torch_logs.set_logs(recompiles=True)
    logger = torch_logs.getArtifactLogger("torch._dynamo.guards", "recompiles")
    logger.propagate = False  # torch's own handler prints each, the expected ones among them
    logger.addHandler(_Recompilations())


class _Recompilations(logging.Handler):
    """Handler of torch's records of recompilations: `Recompiling function NAME in FILE:LINE`, and a reason a line."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count a function's recompilations, and log those beyond the expected ones."""
        first, *reasons = record.getMessage().splitlines()
        name, _, place = first.removeprefix("Recompiling function ").partition(" in ")
        self._counts[first] += 1
        if self._counts[first] > _EXPECTED:
            reason = next((line.strip(" -") for line in reasons if line.strip().startswith("-")), "unknown")
            log.warning(
                "compiled again, %d times now: %s of %s, as %s", self._counts[first], name, Path(place).name, reason
            )
