"""What fsdp makes of a module and its tensors, clipping over devices, and timeouts."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Container, Iterable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import Backend, ProcessGroup
from torch.distributed.distributed_c10d import _get_default_timeout, _world
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.errors import Refused, listed
from lightswitch.mixins import Mixin
from lightswitch.monitoring.throughput import by_mesh, gradient_norm

# Forward methods whose weights autocast rounds to 16 bits at each use: linear and convolution (torch, automatic mixed
# precision)
_ROUNDED = {
    kind.forward
    for kind in (
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        nn.MultiheadAttention,
    )
}
_CONV1D = "transformers.pytorch_utils.Conv1D"  # the linear layer of transformers' GPT-2
_LEAST_ROUNDED_SHARE = 0.9  # of a unit's parameters: the root gathers the others, and they stay gathered for longer


def refuse_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that no parameter, with its name, has a hook of its own on its gradient.

    Raises:
        Refused: one has.
    """
    if hooked := [name for name, one in parameters if one._backward_hooks or one._post_accumulate_grad_hooks]:
        raise Refused(
            f"{listed(hooked)} has a hook on its gradient (register_hook, register_post_accumulate_grad_hook), but a "
            "sharded strategy computes with a different tensor, which has no hook; use strategy=ddp"
        )


def refuse_scripted(model: nn.Module) -> None:
    """Check that no part of a model with parameters runs as TorchScript, in which they can be neither replaced nor
    gathered.

    Raises:
        Refused: one does.
    """
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted := [name for name, part in parts if next(part.parameters(recurse=False), None) is not None]:
        raise Refused(
            f"{listed(scripted)} is scripted (torch.jit.script), so its parameters can't be replaced by shards; leave "
            "that to compile=true, or use strategy=ddp"
        )


class Originals:
    """The parameters of a module before sharding, which makes other tensors of them.

    Args:
        module: module whose parameters are still its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._of = [
            (part, key, names.own_name(f"{path}.{key}"), weakref.ref(parameter), _attributes(parameter))
            for path, part in module.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None
        ]

    def restore_attributes(self) -> None:
        """Set what a module's code has set on its parameters, such as `weight._no_weight_decay = True`, on the tensors
        that are the parameters now."""
        for part, key, *_, attributes in self._of:
            if attributes:
                vars(getattr(part, key)).update(attributes)

    def restore_when_gathered(self, module: nn.Module) -> None:
        """Set the attributes on the gathered parameters as well, which exist from a module's first forward pass on."""

        # a module that is compiled calls it, as it calls torch's own hooks
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # in torch
        def restore_once(*_: object) -> None:
            hook.remove()
            self.restore_attributes()

        if any(attributes for *_, attributes in self._of):
            hook = module.register_forward_pre_hook(restore_once)

    def refuse_uses(self) -> None:
        """Let any use raise an error of what a list, an optimizer or a closure of a constructor still holds."""
        for part, key, name, ref, _ in self._of:
            original = ref()
            if original is not None and original is not part._parameters[key] and type(original) is nn.Parameter:
                original.__class__ = _Original
                vars(original)["own_name"] = name


class _Original(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute with a parameter that does not train.

        Raises:
            Refused: in any case.
        """
        original = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        raise Refused(
            f"{vars(original)['own_name']} is used as the constructor held it, in an optimizer or a list, but a "
            "sharded strategy trains another tensor; make optimizers in configure_optimizers, look weights up in the "
            "module when they are needed, or use strategy=ddp"
        )


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return what code has set on a parameter, unless its attributes are its data."""
    return {} if hasattr(parameter, "__tensor_flatten__") else dict(vars(parameter))


def first_name(owner: object) -> str:
    """Return the name of an object's original class: `fully_shard` gives a module another class."""
    return next(kind.__name__ for kind in type(owner).__mro__ if not issubclass(kind, FSDPModule))


def checkpoint_activations(unit: nn.Module) -> None:
    """Recompute a unit's activations in the backward pass, instead of storing them.

    The recomputation runs inside the hooks that gather the unit's parameters, so these are available.
    """
    patches.replace(unit, "forward", partial(checkpoint, unit.forward, use_reentrant=False))


def is_mostly_rounded(unit: nn.Module) -> bool:
    """Return whether autocast rounds nearly all parameters of a unit each time it computes."""
    rounded = sum(_own_numel(part) for part in unit.modules() if _is_rounded(part))
    return rounded > _LEAST_ROUNDED_SHARE * sum(parameter.numel() for parameter in unit.parameters())


def _is_rounded(module: nn.Module) -> bool:
    """Return whether autocast rounds a module's direct parameters each time the module computes."""
    kind = type(module)
    return kind.forward in _ROUNDED or f"{kind.__module__}.{kind.__name__}" == _CONV1D


def _own_numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def gathered_parts(
    model: nn.Module, roots: Container[nn.Module], sharded: Iterable[nn.Module], halved: Container[nn.Module]
) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules whose direct parameters each sharded module gathers, by the sharded module.

    Modules that none gathers are listed under the model.

    Args:
        roots: gather what belongs to no unit.
        halved: units that are gathered in 16 bits; the root gathers those of their parameters that stay in 32.
    """
    found: dict[nn.Module, list[nn.Module]] = {module: [] for module in (model, *sharded)}
    seen: set[nn.Module] = set()

    def visit(part: nn.Module, root: nn.Module, unit: nn.Module) -> None:
        root = part if part in roots else root
        unit = part if part in found else unit
        seen.add(part)
        found[root if unit in halved and not _is_rounded(part) else unit].append(part)
        for child in part.children():
            if child not in seen:
                visit(child, root, unit)

    visit(model, model, model)
    return found


def replicated_parameters(unit: nn.Module, others: Container[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters of a unit that must be replicated on every device.

    Scalars and empty parameters can't be sharded. Complex ones, and those of another dtype than most of the unit, can't
    be gathered with the others. A metric's network runs outside the model's forward pass.

    Args:
        others: parameters to leave out: those of inner units, and those that are replicated already.
    """
    own = [parameter for parameter in unit.parameters() if parameter not in others]
    counts: Counter[torch.dtype] = Counter()
    for parameter in own:
        counts[parameter.dtype] += 0 if parameter.is_complex() else parameter.numel()
    most = max(counts, key=counts.__getitem__, default=torch.float32)
    whole = {parameter for parameter in own if parameter.dtype != most or parameter.is_complex()}
    whole |= {parameter for parameter in own if parameter.ndim == 0 or parameter.numel() == 0}
    metrics = (part for part in unit.modules() if isinstance(part, Metric))
    return whole.union(*(metric.parameters() for metric in metrics))


class ClipsOverMeshes(Mixin, Precision):
    """Precision plugin that clips by the norm of gradients over all devices.

    `torch.nn.utils.clip_grad_norm_`, which Lightning calls, supports only parameters on one device mesh.
    """

    @torch.no_grad()
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        total = gradient_norm(parameters)
        for of_mesh in by_mesh(parameters).values():
            clip_grads_with_norm_(of_mesh, clip_val, total)


class UnscalesOverMeshes(Mixin, GradScaler):
    """Gradient scaler of parameters that are sharded over several meshes, or over none."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of each mesh, as torch's kernel takes one at a time, and return by device whether a
        gradient of any rank is infinite, so that all ranks skip the step. Collective."""
        is_infinite, devices = found_inf.clone(), set[torch.device]()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for of_mesh in by_mesh(parameters).values():
            part: Any = SimpleNamespace(param_groups=[{"params": of_mesh}])
            for device, found in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                is_infinite = torch.maximum(is_infinite, found.to(is_infinite.device))
                devices.add(device)
        dist.all_reduce(is_infinite, dist.ReduceOp.MAX)
        return {device: is_infinite.to(device) for device in devices}


def set_timeouts(timeout: timedelta | None) -> None:
    """Set the timeout of each process group that has its backend's default.

    Device meshes and DeepSpeed create groups without a timeout. NCCL's default is 10 minutes, after which it ends the
    ranks that wait, and not the rank that they wait for.

    Args:
        timeout: None to change nothing.
    """
    if timeout is None:
        return
    for group, (backend, _) in list(_world.pg_map.items()):
        if any(found == _get_default_timeout(Backend(backend)) for found in timeouts(group)):
            group.set_timeout(timeout)


def timeouts(group: ProcessGroup) -> list[timedelta]:
    """Return the timeouts of a process group's backends, each once: kinds of devices may share a backend."""
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
    return [backend.options._timeout for backend in backends.values() if getattr(backend, "options", None)]
