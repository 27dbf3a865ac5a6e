"""Units of a model (its repeated blocks, or named modules), each sharded, compiled or converted to 8 bits as one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.hooked_strategy import HookedStrategy

log = logging.getLogger(__name__)


def find_units(model: nn.Module, named: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the units of a model by path, outer before inner.

    Args:
        named: class names (``Block``) or paths (``encoder.layers.*``). None: the children of a container that have the
            same class, such as the blocks of a transformer or the stages of a convolutional network.

    Raises:
        Refused: a name matches no module, or a unit shares parameters with the rest of the model.
    """
    held = _held(model)
    if named is None:
        first = {unit: path for path, unit in reversed([*_repeated(model)])}  # a unit may have several paths
        return {path: unit for path, unit in _repeated(model) if first[unit] == path and _is_separable(unit, held)}
    found = {path: module for path, module in model.named_modules() if path and _fits(path, module, named)}
    for name in named:
        if not any(_fits(path, module, [name]) for path, module in found.items()):
            raise Refused(f"units: {name} is neither a class nor a path in {type(model).__name__}; {_classes(model)}")
    for path, unit in found.items():
        if not _is_separable(unit, held):
            raise Refused(
                f"units: {path} shares parameters with modules outside of it; name a module that contains both"
            )
    return found


def called_parts(model: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that have a forward pass, and parameters that no other module shares.

    Under manual optimization, a training step calls these, and steps the optimizer between calls.
    """
    parts, held = [], _held(model)
    for child in model.children():
        if _has_forward(child) and _is_separable(child, held) and any(True for _ in child.parameters()):
            parts.append(child)
        else:
            parts += called_parts(child)
    return parts


def _repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that a container repeats, with their paths."""
    classes = Counter(type(child) for child in module.children() if _has_matrix(child))
    for name, child in module.named_children():
        is_unit = _is_container(module) and classes[type(child)] > 1 and _has_matrix(child) and _has_forward(child)
        if is_unit:
            yield path + name, child
        else:
            yield from _repeated(child, f"{path}{name}.")


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass to register hooks on; a ModuleList has none."""
    return type(module).forward is not nn.Module.forward


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a matrix; the few numbers of a norm are not worth a separate collective."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _is_separable(unit: nn.Module, everywhere: Counter[nn.Parameter]) -> bool:
    """Return whether a unit shares no parameter with modules outside it; tied parameters are gathered by a module that
    contains both.

    Args:
        everywhere: how often the model has each parameter; see `_held`.
    """
    return all(everywhere[parameter] == times for parameter, times in _held(unit).items())


def _held(module: nn.Module) -> Counter[nn.Parameter]:
    """Return how often a module and its parts have each parameter."""
    return Counter(parameter for part in module.modules() for _, parameter in part.named_parameters(recurse=False))


def _fits(path: str, module: nn.Module, names: Sequence[str]) -> bool:
    return any(name == type(module).__name__ or fnmatchcase(path, name) for name in names)


def _classes(model: nn.Module) -> str:
    classes = sorted({type(module).__name__ for module in model.modules() if _has_matrix(module)})
    return f"its classes are {', '.join(classes)}"


class Compilation:
    """Compilation of a model after it is built, and before a strategy shards it.

    Random numbers are the same as without compilation, so a compiled run differs only by rounding.

    Args:
        units: class names or paths of modules to compile; None for the model's repeated blocks, which share one
            compilation, and its losses; an empty list for the training step as one, whose evaluation is not compiled.
        backend: backend of torch.compile.
        mode: mode of the backend inductor; those with CUDA graphs, whose memory a step and FSDP reuse, are left out.
        dynamic: compile for any shape at once; None to do so only for shapes that change.
    """

    def __init__(
        self,
        units: list[str] | None = None,
        backend: str = "inductor",
        mode: Literal["default", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
    ) -> None:
        self.units, self.backend, self.mode, self.dynamic = units, backend, mode, dynamic

    def compile_when_built(self, trainer: Trainer, module: LightningModule) -> None:
        HookedStrategy.of(trainer).when_built(partial(self._compile, trainer, module))

    def _compile(self, trainer: Trainer, model: LightningModule) -> None:
        units = find_units(model, self.units)
        if units and self.units is None:
            units |= _losses(model)
        if units:  # units need no split for DDP; a whole training step is split, so that communication overlaps
            patches.replace(torch._dynamo.config, "optimize_ddp", False)
        for unit in units.values():
            patches.replace(unit, "forward", CompiledForward(unit, self._arguments))
        if not units:
            patches.replace(model, "training_step", torch.compile(model.training_step, **self._arguments))
        if trainer.is_global_zero:
            log.info("compiles   %s by %s", _described(units.values()), self.backend)

    @property
    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"backend": self.backend, "dynamic": self.dynamic}
        if self.backend == "inductor":
            from torch._inductor import list_mode_options

            # with inductor's random generator, dropout would drop other elements than without compilation
            arguments["options"] = {**list_mode_options(self.mode, self.dynamic), "fallback_random": True}
        return arguments


class CompiledForward:
    """Compiled forward method of a module; the module's hooks, some of which gather parameters, run outside it.

    A copy of the module has the uncompiled method of its class.
    """

    def __init__(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self._module = module
        self._forward = torch.compile(module.forward, **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return MethodType, (type(self._module).forward, self._module)


def _losses(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are losses, such as `nn.CrossEntropyLoss()`.

    In eager mode, the loss of a language model reads and writes its logits ten times.
    """
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.modules.loss._Loss)}


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a compiled unit."""
    return isinstance(vars(module).get("forward"), CompiledForward)


def _described(units: Iterable[nn.Module]) -> str:
    kinds = Counter(type(unit).__name__ for unit in units)
    return ", ".join(f"{count} {name}" for name, count in kinds.items()) or "the training step"


_WITH_FLOAT8 = (8, 9)  # compute capability of Ada


class Float8(Callback):
    """Callback that lets the linear layers of a model's units multiply in 8 bits.

    Weights and their names do not change. It rounds more than bfloat16 does, and is faster from about 7 billion
    parameters on, if units are compiled.

    Args:
        recipe: torchao's recipe: one scale for a tensor, the fastest; one for each row; or one for each row, with the
            gradient of weights in 16 bits, the closest to bfloat16.
    """

    def __init__(self, recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise") -> None:
        self.recipe = recipe
        self._is_done = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that this run can multiply in 8 bits, and convert the model once it is built.

        Raises:
            Refused: torchao is not installed, or the GPU, the precision or the strategy does not support it.
        """
        device, strategy = trainer.strategy.root_device, type(trainer.strategy).__name__
        if find_spec("torchao") is None:
            raise Refused("callbacks.float8 needs torchao, which is not installed; type pip install torchao")
        is_fast = device.type == "cuda" and torch.version.hip is None
        is_fast = is_fast and torch.cuda.get_device_capability(device) >= _WITH_FLOAT8
        if not (is_fast and str(trainer.precision).startswith("bf16") and strategy in ("Single", "DDP", "FSDP")):
            raise Refused(
                "callbacks.float8 needs an NVIDIA GPU of compute capability 8.9 (L4, H100), precision=bf16-mixed, and "
                f"strategy=single, ddp or fsdp; the run has {device.type}, {trainer.precision} and {strategy}"
            )
        if not self._is_done:  # in a test after fit it is
            HookedStrategy.of(trainer).when_built(partial(self._convert, pl_module))

    def _convert(self, model: LightningModule) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config, self._is_done = Float8LinearConfig.from_recipe_name(self.recipe), True
        for unit in find_units(model).values():
            convert_to_float8_training(unit, module_filter_fn=lambda layer, _: is_fitting(layer), config=config)
        log.info("products   of linear layers in 8 bits, %s", self.recipe)


def is_fitting(layer: nn.Module) -> bool:
    """Return whether a layer is linear, and both sizes of its matrix are multiples of 16, as cuBLAS needs them."""
    return isinstance(layer, nn.Linear) and layer.in_features % 16 == 0 and layer.out_features % 16 == 0
