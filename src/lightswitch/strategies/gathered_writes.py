"""Reads of sharded weights in hooks, and writes to weights that fsdp has gathered, which are refused.

Outside the forward pass, parameters are shards: DTensors. Writes to them need no help except for `parameter.data = …`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightswitch import patches
from lightswitch.checkpoints.shards import local
from lightswitch.errors import Refused, listed
from lightswitch.strategies.writes import FIRST_STEP_ALONE, Looks

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
        tensor._local_tensor.copy_(_as_shards(value, tensor)._local_tensor)


def _as_shards(value: Tensor, like: DTensor) -> DTensor:
    """Return a tensor that each rank has, or that is cut in another way, in shards like those of a DTensor."""
    mesh, placements = like.device_mesh, like.placements
    if isinstance(value, DTensor):
        return value.redistribute(mesh, placements)
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)


def let_data_be_assigned() -> None:
    """Make `parameter.data = …` write to a DTensor's shard, in this process."""
    patches.replace(DTensor, "data", _Data())


def let_numbers_be_read() -> None:
    """Let `item`, `float` and conditions read the value of a DTensor in this process: torch reads the rank's part."""
    dispatcher = DTensor._op_dispatcher
    handlers = {**dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default: _number}
    patches.replace(dispatcher, "_custom_op_handlers", handlers)


def _number(read: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the number of a DTensor's one element. Collective, unless each rank has it."""
    return read(args[0].full_tensor(), **kwargs)


class WholeBesideShards(TorchFunctionMode):
    """Mode that gives a hook the results of one process for DTensors: reductions, and what torch can't compute on them.

    It gathers DTensors if the first tensor is whole, if torch fails with shards, and if an element is set, which torch
    would do in a copy. A result of which each rank has a part, such as a sum, is reduced at once: torch would read the
    rank's part of it as a number, and computes wrong values with some of them.

    Args:
        hook: description of the hook, for messages.
        compare: called with True before this rank reads with the others, to check that they do; None for no check.
    """

    def __init__(self, hook: str, compare: Callable[[bool], None] | None = None) -> None:
        super().__init__()
        self._hook, self._compare = hook, compare
        self._copies = WeakValueDictionary[int, Tensor]()  # by id, what is a view of a parameter in one process
        self._forwards = 0  # forward passes that the hook is in, whose modules compute with their own shards
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> WholeBesideShards:
        begin = register_module_forward_pre_hook(self._begin_forward)
        self._handles = [begin, register_module_forward_hook(self._end_forward, always_call=True)]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        for handle in self._handles:
            handle.remove()

    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        self._forwards += _has_parameters(module)

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        self._forwards -= _has_parameters(module)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._forwards:
            return func(*args, **kwargs)
        tensors = [one for value in (*args, *kwargs.values()) for one in _flat(value) if isinstance(one, Tensor)]
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and self._copies and tensors and self._is_copy(tensors[0]):
            raise Refused(
                f"{self._hook} writes to a slice of a parameter with {name}, but under fsdp the slice is a copy; write "
                "to the parameter itself (p[…] = …), or use strategy=ddp"
            )
        if not any(isinstance(one, DTensor) for one in tensors):
            return func(*args, **kwargs)
        if name == "__reduce_ex__":  # a hook saves it in a file of its own
            self._wait_for_others()
            whole = args[0].full_tensor().detach().requires_grad_(args[0].requires_grad)
            return whole.__reduce_ex__(*args[1:])
        if name == "__set__" and isinstance(args[0], DTensor):  # an attribute, such as a gradient
            return func(args[0], *(_as_shards(one, args[0]) if isinstance(one, Tensor) else one for one in args[1:]))
        if not isinstance(tensors[0], DTensor) or name == "__setitem__":
            return self._whole(func, args, kwargs, writes)
        if (
            not writes
            and name not in _OF_OBJECTS
            and any(map(_may_be_empty, tensors))
            and _computes(func, args, kwargs)
        ):
            return self._whole(func, args, kwargs, writes)  # an empty shard has no maximum: one rank alone would fail
        try:
            with implicit_replication():
                result = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError, TypeError):  # torch can't compute it on shards
            return self._whole(func, args, kwargs, writes)
        if not writes and any(_is_in_parts(one, tensors[0]) for one in _flat(result)):
            # torch averages unequal shards as if they were equal
            if not all(map(_is_even, tensors)):
                return self._whole(func, args, kwargs, writes)
            self._wait_for_others()
            return _gathered(result)
        self._copies.update((id(one), one) for one in _flat(result) if _is_copied(one, tensors[0], name))
        return result

    def _is_copy(self, tensor: Tensor) -> bool:
        return id(tensor) in self._copies or id(_base(tensor)) in self._copies

    def _wait_for_others(self) -> None:
        if self._compare is not None:
            self._compare(True)

    def _whole(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], writes: bool) -> Any:
        self._wait_for_others()
        whole = [_gathered(value) for value in args]
        result = func(*whole, **{key: _gathered(value) for key, value in kwargs.items()})
        if not writes:
            pairs = zip(chain(*map(_flat, args)), chain(*map(_flat, whole)), strict=True)
            copies = [copy for one, copy in pairs if isinstance(one, DTensor)]
            parts = [one for one in _flat(result) if isinstance(one, Tensor) and any(_shares(one, of) for of in copies)]
            self._copies.update((id(one), one) for one in [*map(_base, copies), *parts])
            return result
        for parameter, its_whole in zip(_flat(args[0]), _flat(whole[0]), strict=True):
            if isinstance(parameter, DTensor):
                parameter.data = its_whole
        return args[0] if isinstance(args[0], DTensor) else result


_OF_OBJECTS = ("__get__", "__deepcopy__")  # attributes and copies, which stay what they are
# functions whose results are views in one process, also where autograd does not record them
_PARTS = ("__getitem__", "narrow", "select", "chunk", "split", "unbind", "view", "reshape", "flatten")


def _is_copied(part: Any, of: DTensor, name: str) -> bool:
    """Return whether a DTensor that is a view of another for autograd, or by the name of its function, is none."""
    if not isinstance(part, DTensor) or not (part._is_view() or name in _PARTS):
        return False
    return not _shares(part._local_tensor, of._local_tensor)


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_in_parts(result: Any, of: DTensor) -> bool:
    """Return whether a result has to be reduced over ranks, or has left the devices that gather it, as by `cpu`."""
    if not isinstance(result, DTensor):
        return False
    has_left = result._local_tensor.device.type != of._local_tensor.device.type
    return has_left or any(placement.is_partial() for placement in result.placements)


def _is_even(tensor: Tensor) -> bool:
    """Return whether the ranks' shards of a tensor have one size."""
    return not any(size % ranks for size, ranks in _cuts(tensor))


def _may_be_empty(tensor: Tensor) -> bool:
    """Return whether a rank's shard of a tensor may have no element: a dimension of 5 is cut in 2, 2, 1 and 0."""
    return any((ranks - 1) * -(-size // ranks) >= size for size, ranks in _cuts(tensor) if ranks > 1)


def _cuts(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the size of each dimension, and the number of ranks that it is cut over."""
    ranks = [1] * tensor.ndim
    if isinstance(tensor, DTensor):
        for placement, count in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if placement.is_shard():
                ranks[placement.dim] *= count  # type: ignore[attr-defined]  # a Shard's
    return [*zip(tensor.shape, ranks, strict=True)]


def _computes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function reads the values of its tensors: it returns neither views nor what shapes tell."""
    there = [_mapped(value, _without_values) for value in args]
    try:
        result = func(*there, **{key: _mapped(value, _without_values) for key, value in kwargs.items()})
    except Exception:  # whatever it needs values for
        return True
    own = {one.untyped_storage()._cdata for value in there for one in _flat(value) if isinstance(one, Tensor)}
    return any(isinstance(one, Tensor) and one.untyped_storage()._cdata not in own for one in _flat(result))


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value, or the items of a list or tuple, with tensors changed."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(one, change) for one in value])
    return change(value) if isinstance(value, Tensor) else value


def _gathered(value: Any) -> Any:
    """Return a value, or the items of a list or tuple, with DTensors gathered. Collective."""
    return _mapped(value, lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


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
    def is_in_place(self) -> bool:
        """Whether the module has this parameter, sharded or gathered, and no other tensor in its place."""
        info, gathered = self.param._module_info, getattr(self.param, "_unsharded_param", None)
        return any(info.module._parameters.get(info.param_name) is one for one in (self.param.sharded_param, gathered))

    @property
    def own(self) -> Tensor:
        """The gathered elements that this rank's shard holds."""
        whole, dim = local(self.param._unsharded_param).data, self.param.fsdp_placement.dim
        chunks = whole.chunk(getattr(self.param.mesh_info, "shard_mesh_size", 1), dim=dim)
        rank = getattr(self.param.mesh_info, "shard_mesh_rank", 0)
        return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)

    @property
    def kept(self) -> Tensor:
        """This rank's shard, in the shape of `own`."""
        kept: Tensor = self.param.sharded_param._local_tensor
        return kept


class GatheredCopies:
    """Gathered parameters, which are freed: what is written to them is lost, and refused.

    Args:
        units: parameters by name, for each module that may free them at the end of its forward pass.
        looks: record of the training steps that are examined for writes.
        instead: what to type.
    """

    def __init__(self, units: Mapping[nn.Module, Mapping[str, Gathered]], looks: Looks, instead: str) -> None:
        self._units, self._looks, self._instead = units, looks, instead
        for module in units:
            module.register_forward_pre_hook(self._begin_forward, prepend=True)  # before FSDP gathers
            module.register_forward_hook(self._end_forward, prepend=True)  # before FSDP frees what it has gathered

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in torch
    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        """Check that a module has its own parameters, which torch would put in the place of any others.

        Raises:
            Refused: it has others, as within `functional_call`.
        """
        if others := [name for name, parameter in self._units[module].items() if not parameter.is_in_place]:
            raise Refused(
                f"another tensor stands in for {listed(others)}, as torch.func.functional_call and an assignment to "
                "the module put it there, but fsdp computes with its own; use strategy=ddp"
            )

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        """Check that nothing was written to gathered parameters, in a step that is examined. Collective.

        Raises:
            Refused: something was.
        """
        if not (self._looks.is_at_work and self._looks.is_due):
            return
        unit = {name: one for name, one in self._units[module].items() if one.is_gathered}
        differ = _differ(unit.values()) if unit else []
        if written := [name for name, differs in zip(unit, differ, strict=True) if differs]:
            raise Refused(
                f"{listed(written, 'parameters')} is written in a step where fsdp has gathered it, so the write would "
                f"be lost; write in a hook such as on_train_batch_end, {self._instead}or use strategy=ddp. If the "
                f"first batch alone sets it, {FIRST_STEP_ALONE}"
            )


def _has_parameters(module: nn.Module) -> bool:
    """Return whether a module computes with parameters of its own: one that averages another's has none."""
    return next(module.parameters(), None) is not None


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

    # a module that is compiled calls it, as it calls torch's own hooks
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in torch
    def read_dtypes(*_: object) -> None:
        hook.remove()
        for group in groups(module):
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


def groups(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's groups of parameters that a module gathers at once."""
    state = module._get_fsdp_state()
    yield from filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])  # before 2.13: one


def _params(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's records of the parameters that a module gathers."""
    for group in groups(module):
        yield from group.fsdp_params


def _is_a_copy(param: Any) -> bool:
    """Return whether the gathered values equal the shards', and no extension computes them from these."""
    return not hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")
