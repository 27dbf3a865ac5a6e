"""Products of a model's units in 8 bits, by torchao, on the GPUs that have them."""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.strategies.units import find_units

log = logging.getLogger(__name__)

_WITH_FLOAT8 = (8, 9)  # compute capability of Ada
_MULTIPLE = 16  # of both sizes of a matrix, for cuBLAS
_STRATEGIES = ("Single", "DDP", "FSDP")


class Float8(Callback):
    """Callback that lets the linear layers of a model's units multiply in 8 bits; weights stay as they are, and so do
    their names. It rounds more than bfloat16 does, and gains from about 7 billion parameters on, where units are
    compiled.

    Args:
        recipe: of torchao: one scale for a tensor, the fastest; for each row; or for each row, with the gradient of
            weights in 16 bits, the closest to bfloat16.
    """

    def __init__(self, recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise") -> None:
        self.recipe = recipe
        self._is_done = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._is_done:  # in a test after fit
            return
        _check(trainer)
        if is_overridden("configure_model", pl_module):
            patches.call_after(pl_module, "configure_model", partial(self._convert, pl_module))
        else:
            self._convert(pl_module)

    def _convert(self, model: LightningModule) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        self._is_done = True
        count = 0
        for unit in find_units(model).values():
            fitting = {name for name, layer in unit.named_modules() if is_fitting(layer)}
            count += len(fitting)
            config = Float8LinearConfig.from_recipe_name(self.recipe)
            convert_to_float8_training(unit, module_filter_fn=lambda _, name, fit=fitting: name in fit, config=config)
        log.info("products   of %d linear layers in 8 bits, %s", count, self.recipe)


def is_fitting(layer: nn.Module) -> bool:
    """Return whether a layer is one of a matrix that kernels for 8 bits take."""
    if not isinstance(layer, nn.Linear):
        return False
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _check(trainer: Trainer) -> None:
    """Check that this run can multiply in 8 bits.

    Raises:
        Refused: the package, the GPU, the precision or the strategy is not one for it.
    """
    off = "leave out callbacks.float8"
    device, strategy = trainer.strategy.root_device, type(trainer.strategy).__name__
    if find_spec("torchao") is None:
        raise Refused(f"callbacks.float8 needs torchao, which is not installed; pip install torchao, or {off}")
    if device.type != "cuda" or torch.version.hip is not None:
        raise Refused(f"callbacks.float8 is for NVIDIA's GPUs, and the run is on {device.type}; {off}")
    if (found := torch.cuda.get_device_capability(device)) < _WITH_FLOAT8:
        card = torch.cuda.get_device_name(device)
        raise Refused(f"{card} has compute capability {found[0]}.{found[1]}, and 8 bits need 8.9 (L4, H100); {off}")
    if not str(trainer.precision).startswith("bf16"):
        raise Refused(f"callbacks.float8 is for bfloat16, and the run is at {trainer.precision}; use bf16-mixed")
    if strategy not in _STRATEGIES:
        raise Refused(f"callbacks.float8 is not for strategy {strategy}; use strategy=single, ddp or fsdp, or {off}")
