"""Data × tensor parallelism: layers split by a plan that comes with the model, and then sharded as under fsdp."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from hydra.utils import get_object
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.errors import Refused
from lightswitch.strategies.fsdp import FSDP


class TensorParallel(FSDP):
    """Data × tensor parallelism: layers split over groups of devices by a plan, and then sharded as under fsdp.

    The devices of a group draw the same random numbers, so that replicated values stay equal; dropout inside a split
    layer therefore drops the same elements of each shard.

    Args:
        tensor_parallel_size: number of devices that share a layer and read the same samples; best within a node.
        plans: by the model's class name, the dotted path of a function; it takes the model and
            ``tensor_parallel_size``, and returns torch's parallel styles by module path, in which `*` matches anything.
        options: arguments of FSDP.
    """

    def __init__(self, tensor_parallel_size: int, plans: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._tensor_parallel_size = tensor_parallel_size
        self.plans = plans
        self._styles: dict[nn.Module, ParallelStyle] = {}

    def prepared(self) -> nn.Module:
        """Return the module, ready to be split, and look up the styles of its layers.

        Raises:
            Refused: there is no plan for the module, or the plan matches none of its submodules.
        """
        model = super().prepared()
        plan = self.styles_of(model)
        self._styles = {
            module: style
            for path, module in model.named_modules()
            for pattern, style in plan.items()
            if fnmatchcase(path, pattern)
        }
        if not self._styles:
            raise Refused(
                f"the plan {', '.join(plan)} matches no module of {type(model).__name__}; its keys must be paths of "
                "modules"
            )
        data_parallel = self._data_parallel_mesh
        group = (data_parallel if data_parallel.ndim == 1 else data_parallel._flatten()).get_group()
        for module in model.modules():
            if isinstance(module, Metric):  # the devices of a group read the same samples: count them once
                patches.replace(module, "process_group", group)
        return model

    def styles_of(self, model: nn.Module) -> dict[str, ParallelStyle]:
        """Return the parallel styles of a module's layers, by a pattern of their paths.

        Raises:
            Refused: there is no plan for the module, or its sizes do not divide.
        """
        named = next((self.plans[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in self.plans), None)
        if named is None:
            raise Refused(f"there is no tensor-parallel plan for {type(model).__name__}; use strategy=fsdp")
        try:
            plan: dict[str, ParallelStyle] = get_object(named)(model, self._tensor_parallel_size)
        except ValueError as error:
            raise Refused(str(error)) from error
        return plan

    def _shard_unit(self, module: nn.Module, parts: Sequence[nn.Module], is_root: bool) -> None:
        for part in parts:
            if part in self._styles and self._tensor_parallel_size != 1:
                self._cut(part, self._styles.pop(part))
        super()._shard_unit(module, parts, is_root)

    def _cut(self, layer: nn.Module, style: ParallelStyle) -> None:
        trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
        parallelize_module(layer, self.device_mesh["tensor_parallel"], style)
        for name, parameter in layer.named_parameters():  # styles make new ones, and some make them trainable
            parameter.requires_grad_(trained[name])
