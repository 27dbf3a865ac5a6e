"""Writes to weights that fsdp has gathered, carried over to their shards.

Outside the forward pass, parameters are shards, and writes need no help except for `parameter.data = …`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode

from lightswitch import patches
from lightswitch.errors import Refused, listed
from lightswitch.strategies.writes import Looks, carried, share, take_rank_0s

_data_of_tensor: Any = torch.Tensor.data


class _Data:
    """The `data` attribute of a DTensor, made assignable: torch accepts an assignment but does not change the shard."""

    def __get__(self, tensor: DTensor | None, kind: type) -> Any:
        return self if tensor is None else _data_of_tensor.__get__(tensor, kind)

    @torch.no_grad()
    def __set__(self, tensor: DTensor, value: Tensor) -> None:
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            _data_of_tensor.__set__(tensor, value)
            return
        mesh, placements = tensor.device_mesh, tensor.placements
        if isinstance(value, DTensor):
            value = value.redistribute(mesh, placements)
        else:
            value = distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
        tensor._local_tensor.copy_(value._local_tensor)


def let_data_be_assigned() -> None:
    """Make `parameter.data = …` write to a DTensor's shard, in this process."""
    patches.replace(DTensor, "data", _Data())


class WholeBesideShards(TorchFunctionMode):
    """Mode that lets a hook combine whole tensors and DTensors, such as an average in buffers and a parameter.

    It gathers DTensors if the first tensor is whole, if torch can't compute with shards, and if an element is set,
    which torch would do in a copy.

    Args:
        hook: description of the hook, for messages.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        self._hook = hook
        self._copies: dict[int, DTensor] = {}  # results that would be views, if their tensor were whole

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for value in (*args, *kwargs.values()) for one in _flat(value) if isinstance(one, Tensor)]
        if not any(isinstance(one, DTensor) for one in tensors):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and id(tensors[0]) in self._copies:
            raise Refused(
                f"{self._hook} writes to a slice of a parameter with {name}, but under fsdp the slice is a copy; write "
                "to the parameter itself (p[…] = …), or use strategy=ddp"
            )
        if isinstance(tensors[0], DTensor) and name != "__setitem__":
            try:
                with implicit_replication():
                    result = func(*args, **kwargs)
            except NotImplementedError:  # torch can't compute it on shards
                return self._whole(func, args, kwargs, writes)
            if name in _PARTS:
                self._copies.update((id(part), part) for part in _flat(result) if not _is_view(part, tensors[0]))
            return result
        return self._whole(func, args, kwargs, writes)

    def _whole(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], writes: bool) -> Any:
        whole = [_gathered(value) for value in args]
        result = func(*whole, **{key: _gathered(value) for key, value in kwargs.items()})
        if not writes:
            return result
        for parameter, its_whole in zip(_flat(args[0]), _flat(whole[0]), strict=True):
            if isinstance(parameter, DTensor):
                parameter.data = its_whole
        return args[0] if isinstance(args[0], DTensor) else result


_PARTS = ("__getitem__", "narrow", "select", "chunk", "split", "unbind", "view", "reshape", "flatten")


def _is_view(part: Any, of: DTensor) -> bool:
    if not isinstance(part, DTensor):
        return True
    return part._local_tensor.untyped_storage().data_ptr() == of._local_tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _gathered(value: Any) -> Any:
    """Return a value, or the items of a list or tuple, with DTensors gathered. Collective."""
    if isinstance(value, list | tuple):
        return type(value)(map(_gathered, value))
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass(frozen=True)
class Gathered:
    """A sharded parameter that is gathered when it is needed.

    Attributes:
        param: torch's record of it.
    """

    param: Any

    @property
    def is_gathered(self) -> bool:
        return bool(self.param.sharded_state.name == "UNSHARDED")

    @property
    def is_cut(self) -> bool:
        """Whether ranks gather different shards of it, as under tensor parallelism."""
        return isinstance(self.param._unsharded_param, DTensor)

    @property
    def whole(self) -> Tensor:
        """The gathered values, including any `data` assigned since, in the parameter's shape; with `is_cut`, the
        gathered shard."""
        parameter: Tensor = self.param._unsharded_param
        if isinstance(parameter, DTensor):  # under tensor parallelism
            return parameter._local_tensor.data
        (into,) = self.param.all_gather_outputs
        if parameter.data_ptr() != into.data_ptr():
            _link(parameter, into.as_strided(self.param._orig_size, self.param._contiguous_orig_stride, 0))
        return parameter.data

    @property
    def own(self) -> Tensor:
        """The elements of `whole` that this rank's shard holds."""
        mesh, dim = self.param.mesh_info, self.param.fsdp_placement.dim
        chunks = self.whole.chunk(getattr(mesh, "shard_mesh_size", 1), dim=dim)
        rank = getattr(mesh, "shard_mesh_rank", 0)
        return chunks[rank] if rank < len(chunks) else self.whole.narrow(dim, 0, 0)

    @property
    def kept(self) -> Tensor:
        """This rank's shard, in the shape of `own`."""
        kept: Tensor = self.param.sharded_param._local_tensor
        return kept


@torch.no_grad()
def _link(parameter: Tensor, into: Tensor) -> None:
    """Copy `data` assigned to a gathered parameter into the gather buffer, and make the parameter use it again."""
    into.data.copy_(parameter.data)  # unnoticed by autograd, which may have saved it
    parameter.data = into.data


class GatheredWrites:
    """Gathered parameters, with writes to them copied to their shards.

    Args:
        units: parameters by name, for each module that may free them at the end of its forward pass.
        looks: record of the training steps that are examined for writes.
    """

    def __init__(self, units: Mapping[nn.Module, Mapping[str, Gathered]], looks: Looks) -> None:
        self._units, self._looks = units, looks
        for module in units:
            module.register_forward_hook(self._end_forward, prepend=True)  # before FSDP frees what it has gathered

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        if self._looks.is_at_work and (self._looks.is_due or self._looks.written):
            self._carry(self._units[module])

    def _carry(self, unit: Mapping[str, Gathered]) -> None:
        unit = {name: parameter for name, parameter in unit.items() if parameter.is_gathered}
        written, shared = self._looks.written, self._looks.shared
        if self._looks.is_due and unit:
            written = {name for name, differs in zip(unit, _differ(unit.values()), strict=True) if differs}
            _refuse_rounding(unit, written)
            written_whole = {name: one.whole for name, one in unit.items() if name in written and not one.is_cut}
            shared = share(written_whole)
            self._looks.found(written, shared)
        elif again := [parameter.whole for name, parameter in unit.items() if name in shared]:
            take_rank_0s(again)
        self._follow(parameter for name, parameter in unit.items() if name in written)

    def follow(self) -> None:
        """Copy a hook's writes to gathered parameters to their shards."""
        for unit in self._units.values():
            if any(parameter.is_gathered for parameter in islice(unit.values(), 1)):  # all or none
                self._follow(unit.values())

    def _follow(self, parameters: Iterable[Gathered]) -> None:
        for parameter in parameters:
            carried(parameter.own, parameter.kept)


def _refuse_rounding(unit: Mapping[str, Gathered], written: Collection[str]) -> None:
    """Check that written parameters were gathered in the dtype of their shards: in 16 bits, an average would not move.

    Raises:
        Refused: one was not.
    """
    rounded = [name for name in sorted(written) if unit[name].own.dtype != unit[name].kept.dtype]
    if rounded:
        raise Refused(
            f"{listed(rounded)} is set in training_step, but gathered in {str(unit[rounded[0]].own.dtype)[6:]}, which "
            "would round the new values; type trainer.strategy.param_dtype=float32"
        )


@torch.no_grad()
def _differ(parameters: Iterable[Gathered]) -> list[bool]:
    """Return which parameters were written to, on any rank. Collective."""
    pairs = [(parameter.own, parameter.kept) for parameter in parameters]
    device = pairs[0][0].device
    differ = torch.stack([(own != kept.to(own)).any() for own, kept in pairs]).int().to(device)
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    return [bool(one) for one in differ.tolist()]


def of_fsdp(root: nn.Module, names: Mapping[nn.Parameter, str]) -> dict[nn.Module, dict[str, Gathered]]:
    """Return the parameters that FSDP2 gathers, by unit and name.

    Args:
        names: names by parameter.
    """
    return {
        module: {names[param.sharded_param]: Gathered(param) for param in _params(module) if _is_a_copy(param)}
        for module in root.modules()
        if isinstance(module, FSDPModule)
    }


def reduce_as_if_trained(module: FSDPModule) -> None:
    """Reduce gradients in the dtype of the policy even if a module's parameters are all frozen at first.

    torch reads the dtypes at the first forward pass from those that are trained then. Without any, gradients of a later
    pass, as of a backbone that is unfrozen, would be reduced in the dtype of the computation, and not fit parameters.
    """

    def read_dtypes(*_: object) -> None:
        hook.remove()
        for group in _groups(module):
            shards = [param.sharded_param for param in group.fsdp_params]
            dtypes = {shard.dtype for shard in shards}
            if len(dtypes) != 1 or not dtypes.pop().is_floating_point or any(shard.requires_grad for shard in shards):
                continue
            for shard in shards:
                shard.requires_grad_(True)
            group._init_mp_dtypes()
            for shard in shards:
                shard.requires_grad_(False)

    hook = module.register_forward_pre_hook(read_dtypes)  # type: ignore[attr-defined]  # a module's class


def _groups(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's groups of parameters that a module gathers at once."""
    state = module._get_fsdp_state()
    yield from filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])  # before 2.13: one


def _params(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's records of the parameters that a module gathers."""
    for group in _groups(module):
        yield from group.fsdp_params


def _is_a_copy(param: Any) -> bool:
    """Return whether the gathered values equal the shards', and no extension computes them from these."""
    return not hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")
