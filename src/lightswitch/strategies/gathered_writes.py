"""Reads of sharded weights in hooks, and writes to weights that fsdp has gathered, which are refused.

Outside the forward pass, parameters are shards: DTensors. Writes to them need no help except for `parameter.data = …`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
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


def refuse_pickles() -> None:
    """Refuse to pickle a DTensor in this process, as `torch.save` does in a hook: a file would hold a rank's shard."""
    copyreg.pickle(DTensor, _refuse_pickle)


def _refuse_pickle(tensor: DTensor) -> NoReturn:
    raise Refused(
        f"a weight of shape {tuple(tensor.shape)}, of which each rank holds a shard, is pickled, as by torch.save; use "
        "trainer.save_checkpoint, or strategy=ddp"
    )


class ShardsInHook(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Mode in which a hook computes with shards: a plain tensor counts as equal on all ranks, and a result that ranks
    have to add up, such as a norm, is whole.

    Args:
        hook: description of the hook, for messages.
        weights: names and shards of the weights.
        compare: called with True before this rank reads with the others, to check that they do; None for no check.
    """

    def __init__(
        self, hook: str, weights: Iterable[tuple[str, DTensor]], compare: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._hook, self._weights, self._compare = hook, weights, compare
        self._forwards = 0  # forward passes that the hook is in, whose modules compute with their own shards
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ShardsInHook:
        begin = register_module_forward_pre_hook(self._begin_forward)
        self._handles = [begin, register_module_forward_hook(self._end_forward, always_call=True)]
        super().__enter__()  # type: ignore[no-untyped-call]  # likewise
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # likewise
        for handle in self._handles:
            handle.remove()

    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        self._forwards += _has_parameters(module)

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        self._forwards -= _has_parameters(module)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if self._forwards or not any(isinstance(one, DTensor) for one in tree_leaves(given)):
            return func(*args, **given[1])
        written = tree_leaves(args[0]) if func._schema.is_mutable else []
        if written and not any(isinstance(one, DTensor) for one in written):  # such as an average in a buffer
            return self._on_whole(func, given)
        with implicit_replication():
            result = func(*args, **given[1])
        made = [one for one in tree_leaves(result) if isinstance(one, DTensor) and not written]
        if any(getattr(placement, "reduce_op", None) == "avg" for one in made for placement in one.placements):
            return self._on_whole(func, given)  # torch averages unequal shards as if they were equal
        if func.is_view and isinstance(args[0], DTensor) and any(not _shares(one, args[0]) for one in made):
            raise Refused(
                f"{self._hook} takes a part of {self._name(args[0])}, of which each rank holds a shard: the part would "
                "be a copy, and a write to it lost; compute with the whole weight, or use strategy=ddp"
            )
        return result if written else tree_map_only(DTensor, self._added_up, result)

    def _on_whole(self, func: Any, given: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        args, kwargs = tree_map_only(DTensor, self._gathered, given)
        return func(*args, **kwargs)

    def _added_up(self, result: DTensor) -> Tensor:
        return result if any(placement.is_shard() for placement in result.placements) else self._gathered(result)

    def _gathered(self, tensor: DTensor) -> Tensor:
        if self._compare is not None:
            self._compare(True)
        return tensor.full_tensor()

    def _name(self, part: DTensor) -> str:
        return next((name for name, weight in self._weights if _shares(weight, part)), "a tensor")


def _shares(one: DTensor, other: DTensor) -> bool:
    """Return whether two tensors have this rank's elements in the same memory."""
    return one._local_tensor.untyped_storage().data_ptr() == other._local_tensor.untyped_storage().data_ptr()


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
