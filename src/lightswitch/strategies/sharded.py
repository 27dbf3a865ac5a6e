"""What fsdp makes of a module: its tensors, gradients that not all ranks have, and clipping over devices."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightswitch import patches
from lightswitch.checkpoints import names
from lightswitch.errors import Refused, listed
from lightswitch.hooked_strategy import Mixin, with_mixin
from lightswitch.monitoring.throughput import by_mesh, gradient_norm
from lightswitch.strategies.weights import groups

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
_COMPARED_PASSES = 10  # in which ranks wait to hear whether all have used the same units
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

    def hand_over(self) -> None:
        """Set what a module's code has set on its parameters, such as `weight._no_weight_decay = True`, on the tensors
        that are the parameters now; let any use raise an error of what a list, an optimizer or a closure still holds.
        """
        for part, key, name, ref, attributes in self._of:
            original, made = ref(), part._parameters[key]
            vars(made).update(attributes)
            if original is not None and original is not made and type(original) is nn.Parameter:
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
    rounded = [one.numel() for part in unit.modules() if _is_rounded(part) for one in part.parameters(recurse=False)]
    return sum(rounded) > _LEAST_ROUNDED_SHARE * sum(parameter.numel() for parameter in unit.parameters())


def _is_rounded(module: nn.Module) -> bool:
    """Return whether autocast rounds a module's direct parameters each time the module computes."""
    kind = type(module)
    return kind.forward in _ROUNDED or f"{kind.__module__}.{kind.__name__}" == _CONV1D


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


def initialize(modules: Iterable[FSDPModule]) -> None:
    """Let torch initialize modules now, roots first, as if all of their parameters were trained.

    In the first forward pass, it would read the dtypes in which gradients are reduced from the parameters that are
    trained then. Without any, gradients of a later pass, as of a backbone that is unfrozen, would be reduced in the
    dtype of the computation, and not fit parameters. Roots can't be initialized after modules within them.
    """
    for module in modules:
        state = module._get_fsdp_state()
        inside = [one for one in module.modules() if isinstance(one, FSDPModule)]  # type: ignore[attr-defined]  # a module's class
        shards = [param.sharded_param for one in inside for group in groups(one) for param in group.fsdp_params]
        frozen = [shard for shard in shards if not shard.requires_grad and shard.is_floating_point()]
        for shard in frozen:
            shard.requires_grad_(True)
        state._lazy_init()
        for shard in frozen:
            shard.requires_grad_(False)


class UnevenUse:
    """Record of which parameters the backward passes of a step use, on this rank and on others.

    Sharded gradients are reduced by torch, unit by unit, and without those of parameters that have none: sizes would
    differ between ranks that use different ones, and the reduction fail, or add up gradients of different parameters.
    They get zeros before it, which are taken away after the pass if no rank has used the parameter. Gradients of
    replicated parameters are averaged after a pass.

    Args:
        root: the model; if it is among the units, every pass goes through it.
        units: modules that each gather parameters.
        replicated: parameters that each rank holds whole, in the same order on all ranks.
        device: the rank's device.
        own_weight: returns the weight of this rank's loss in a pass that the module has started itself
            (`loss.backward()`); 1 in a pass of Lightning's, whose loss is weighted already.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[nn.Module],
        replicated: Sequence[nn.Parameter],
        device: torch.device,
        own_weight: Callable[[], float | Tensor],
    ) -> None:
        self._root, self._own_weight = root, own_weight
        self._groups: list[Any] = []  # torch's, of parameters that are gathered together
        self._replicated, self._device = replicated, device
        self._used: set[Any] = set()  # torch's records of parameters
        self._filled: dict[Any, bool] = {}  # by record, whether it had a gradient before
        self._reduced = 0  # digest of the units that the pass has reduced, in order
        self._passes = 0
        for unit in units:
            for group in groups(unit) if isinstance(unit, FSDPModule) else ():
                reduce = partial(self._reduce, len(self._groups), group, unit is root, group.post_backward)
                patches.replace(group, "post_backward", reduce)
                self._groups.append(group)
        self._sharded = [param for group in self._groups for param in group.fsdp_params]
        for parameter in replicated:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * self._own_weight())  # type: ignore[no-untyped-call]  # untyped in torch

    def _reduce(self, index: int, group: Any, is_root: bool, reduce: Callable[..., None], *args: Any) -> None:
        """Reduce the gradients of a unit, with zeros for parameters that have none.

        A unit without any gradient is left out, as the pass is one of another optimizer.

        Raises:
            Refused: the module differentiates a gradient: autograd then records the backward pass itself.
        """
        if torch.is_grad_enabled():
            raise Refused(
                f"{type(self._root).__name__.removeprefix('FSDP')} differentiates a gradient (create_graph=True), "
                "which needs each parameter a third time, when it is no longer gathered; use strategy=ddp"
            )
        # those that have not been gathered yet have no gathered parameter
        params = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
        trained = [one for one in params if one.unsharded_param.requires_grad]
        here = {one for one in trained if one.unsharded_param.grad is not None}
        weight = self._own_weight()
        if isinstance(weight, Tensor) or weight != 1:
            for one in here:
                one.unsharded_param.grad.mul_(weight)
        self._used |= here
        if dist.get_world_size() > 1 and (here or is_root):
            self._reduced = zlib.crc32(index.to_bytes(4, "big"), self._reduced)
            for one in trained:
                if one not in here:
                    self._filled.setdefault(one, one.sharded_param.grad is not None)
                    parameter = one.unsharded_param
                    parameter.grad = torch.zeros_like(parameter)
        reduce(*args)

    def settle(self) -> None:
        """Average replicated gradients, and take away those of sharded parameters that no rank has used, at the end of
        a pass. Collective.

        An average of replicated gradients that are equal on all ranks already leaves them unchanged.

        Raises:
            Refused: the ranks have used different units, in one of the first passes.
        """
        if dist.get_world_size() == 1:
            return
        replicated = [one for one in self._replicated if one.requires_grad and one.numel()]
        here = [int(one.grad is not None) for one in replicated]
        here += [int(one in self._used or one not in self._filled) for one in self._sharded]
        if not here:
            return
        anywhere = self._largest(here)
        for parameter, is_used in zip(replicated, anywhere[: len(replicated)], strict=True):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        for one, is_used in zip(self._sharded, anywhere[len(replicated) :], strict=True):
            if not is_used and not self._filled[one]:
                parameter = one.sharded_param
                parameter.grad = None
        self._used.clear()
        self._filled.clear()

    def _largest(self, here: Sequence[int]) -> Sequence[int]:
        """Return the largest of each number over all ranks, and check that all have reduced the same units.

        A rank on which all numbers are 1 does not wait for the device, after the first passes.
        """
        self._passes += 1
        waits = not all(here) or self._passes <= _COMPARED_PASSES
        digests, self._reduced = [self._reduced, -self._reduced], 0
        # a copy from the host would wait for the device
        found = (
            torch.tensor([*digests, *here], device=self._device)
            if waits
            else torch.ones(2 + len(here), dtype=torch.int64, device=self._device)
        )
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if not waits:
            return here
        most, least, *anywhere = found.tolist()
        if self._passes <= _COMPARED_PASSES and most != -least:
            raise Refused(
                "the ranks run different blocks of the model in one step, and fsdp gathers and reduces those of all "
                "ranks together, so that their weights would mix; run the same ones on all ranks, or use strategy=ddp "
                "with trainer.strategy.find_unused_parameters=true"
            )
        return anywhere


class ClipsOverMeshes(Mixin, Precision):
    """Precision plugin that clips by the norm of gradients over all devices.

    `torch.nn.utils.clip_grad_norm_`, which Lightning calls, supports only parameters on one device mesh.
    """

    scaler: Any = None  # of MixedPrecision

    def scale_over_meshes(self) -> None:
        if self.scaler is not None:
            self.scaler = with_mixin(UnscalesOverMeshes, self.scaler)

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
