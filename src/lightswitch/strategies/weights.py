"""Weights that hooks and steps write outside of the optimizer: on shards, as in one process, or refused by name.

Examples are a momentum encoder, an average by hand, and clipped weights. Outside of a forward pass, the parameters of
fsdp are shards (DTensors), so elementwise writes need no help. What is written to a copy, which a strategy computes
with and frees or overwrites, would be lost, and is refused.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from lightswitch import patches
from lightswitch.checkpoints.shards import local
from lightswitch.errors import Refused, listed

FIRST_STEP_ALONE = (
    "train the first step in one process (strategy=single trainer.devices=1 trainer.max_steps=1 run_id=NAME), and go "
    "on with the same run_id"
)
_CONTEXTS = {  # of a precision plugin, by step
    **{"training_step": "train_step_context", "validation_step": "val_step_context"},
    **{"test_step": "test_step_context", "predict_step": "predict_step_context"},
}
_FIRST = 3  # steps that are examined: each examination reads every weight
_data_of_tensor: Any = torch.Tensor.data


class WatchedWeights(Strategy):
    """Base of strategies that compute with copies of weights; list it before Lightning's strategy.

    Attributes:
        is_examined: the step that is running is examined for writes that would be lost: the first ones of each epoch,
            of the first evaluation, after each save, and after each evaluation, for which a module may merge weights.
        is_in_backward: a backward pass of Lightning's is running, and none that the module has started itself.
    """

    is_examined = is_in_backward = False
    _steps = _evaluations = 0  # since the last moment from which they are examined
    _is_in_hook = False
    _mode: Any = None  # of torch, in which the hook runs

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        return self._watched("training_step", self._steps, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluations, self._steps = self._evaluations + 1, 0
        return self._watched("validation_step", self._evaluations, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluations += 1
        return self._watched("test_step", self._evaluations, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluations += 1
        return self._watched("predict_step", self._evaluations, *args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.is_in_backward = True
        output = super().backward(*args, **kwargs)
        self.is_in_backward = False  # no try/finally: an error ends the run
        return output

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self._steps = 0

    def _watched(self, step: str, number: int, *args: Any, **kwargs: Any) -> Any:
        self.is_examined = number <= _FIRST and detect_fake_mode() is None  # a simulated step has no values
        name = f"{step} of {type(self.lightning_module).__name__}"
        with getattr(self.precision_plugin, _CONTEXTS[step])(), self.around_step(name):
            output = self.run_step(step, *args, **kwargs)
        self.is_examined = False  # no try/finally: an error ends the run
        return output

    def run_step(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step of the module through the strategy's wrapper."""
        assert self.model is not None
        assert self.lightning_module is not None
        return self._forward_redirection(self.model, self.lightning_module, step, *args, **kwargs)

    def around_step(self, step: str) -> AbstractContextManager[None]:
        """Return a context in which a step runs, with checks if it `is_examined`.

        Args:
            step: description of the step, such as "training_step of MyModel".
        """
        return nullcontext()

    def whole_weights(self, hook: str) -> AbstractContextManager[Any]:
        """Return a context, with its mode of torch, in which a hook reads and writes weights as in one process, or is
        refused.

        Args:
            hook: description of the hook, such as "on_train_batch_end of MyModel".
        """
        return nullcontext()

    @contextmanager
    def around_hook(self, hook: str) -> Iterator[None]:
        """Context in which a user's hook runs; nested hooks use the outer hook's context."""
        if self._is_in_hook:
            yield
            return
        self._is_in_hook = True
        try:
            with self.whole_weights(hook) as self._mode:
                yield
        finally:
            self._is_in_hook, self._mode = False, None

    @contextmanager
    def outside_of_hooks(self) -> Iterator[None]:
        """Context of a step that a hook calls, such as a module's `optimizer_step`: it suspends the hook's mode."""
        mode = self._mode
        if mode is not None:
            mode.__exit__(None, None, None)
        yield  # no try/finally: an error ends the run
        if mode is not None:
            mode.__enter__()


# Shards outside of forward passes


def let_shards_be_used() -> None:
    """In this process, let assigned `data` reach a DTensor's shard, and `item`, `float` and conditions read its value,
    which torch does of the rank's part; and refuse to pickle one, as `torch.save` does: a file would hold a shard."""
    patches.replace(DTensor, "data", _Data())
    dispatcher = DTensor._op_dispatcher
    handlers = {**dispatcher._custom_op_handlers, torch.ops.aten._local_scalar_dense.default: _number}
    patches.replace(dispatcher, "_custom_op_handlers", handlers)
    copyreg.pickle(DTensor, _refuse_pickle)


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
        sharded = (
            value.redistribute(mesh, placements)
            if isinstance(value, DTensor)
            else distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
        )
        tensor._local_tensor.copy_(sharded._local_tensor)


def _number(read: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the number of a DTensor's one element. Collective, unless each rank has it."""
    return read(args[0].full_tensor(), **kwargs)


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
    """

    def __init__(self, hook: str, weights: Iterable[tuple[str, DTensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._hook, self._weights = hook, weights
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
            return _on_whole(func, given)
        from torch.distributed.tensor.experimental import implicit_replication  # slow, and only sharded runs need it

        with implicit_replication():
            result = func(*args, **given[1])
        made = [one for one in tree_leaves(result) if isinstance(one, DTensor) and not written]
        if any(getattr(placement, "reduce_op", None) == "avg" for one in made for placement in one.placements):
            return _on_whole(func, given)  # torch averages unequal shards as if they were equal
        if func.is_view and isinstance(args[0], DTensor) and any(not _shares(one, args[0]) for one in made):
            name = next((name for name, weight in self._weights if _shares(weight, args[0])), "a tensor")
            raise Refused(
                f"{self._hook} takes a part of {name}, of which each rank holds a shard: the part would be a copy, "
                "and a write to it lost; compute with the whole weight, or use strategy=ddp"
            )
        return result if written else tree_map_only(DTensor, _added_up, result)


def _on_whole(func: Any, given: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
    args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, given)
    return func(*args, **kwargs)


def _added_up(result: DTensor) -> Tensor:
    return result if any(placement.is_shard() for placement in result.placements) else result.full_tensor()


def _shares(one: DTensor, other: DTensor) -> bool:
    """Return whether two tensors have this rank's elements in the same memory."""
    return one._local_tensor.untyped_storage().data_ptr() == other._local_tensor.untyped_storage().data_ptr()


def _has_parameters(module: nn.Module) -> bool:
    """Return whether a module computes with parameters of its own: one that averages another's has none."""
    return next(module.parameters(), None) is not None


# Gathered copies within forward passes


class GatheredCopies:
    """Parameters that FSDP2 gathers for a unit's forward pass, and frees: what is written to them is lost, and refused.

    Args:
        root: the sharded model.
        names: names by parameter.
        strategy: says whether a step is examined.
        instead: what to type.
    """

    def __init__(
        self, root: nn.Module, names: Mapping[nn.Parameter, str], strategy: WatchedWeights, instead: str
    ) -> None:
        self._strategy, self._instead = strategy, instead
        self._units = {
            module: {
                names[param.sharded_param]: param
                for group in groups(module)
                for param in group.fsdp_params
                # others are computed from the shards, and are no copies
                if not hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")
            }
            for module in root.modules()
            if isinstance(module, FSDPModule)
        }
        for module in self._units:
            module.register_forward_pre_hook(self._begin_forward, prepend=True)  # before FSDP gathers
            module.register_forward_hook(self._end_forward, prepend=True)  # before it frees

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in torch
    def _begin_forward(self, module: Any, *_: Any) -> None:
        """Check that a module has its own parameters, which torch would put in the place of any others.

        Raises:
            Refused: it has others, as within `functional_call`.
        """
        if others := [name for name, param in self._units[module].items() if not _is_in_place(param)]:
            raise Refused(
                f"another tensor stands in for {listed(others)}, as torch.func.functional_call and an assignment to "
                "the module put it there, but fsdp computes with its own; use strategy=ddp"
            )

    def _end_forward(self, module: Any, *_: Any) -> None:
        """Check that nothing was written to gathered parameters, in a step that is examined. Collective.

        Raises:
            Refused: something was.
        """
        if not self._strategy.is_examined:
            return
        gathered = {name: one for name, one in self._units[module].items() if one.sharded_state.name == "UNSHARDED"}
        differ = _differ(gathered.values()) if gathered else []
        if written := [name for name, differs in zip(gathered, differ, strict=True) if differs]:
            raise Refused(
                f"{listed(written, 'parameters')} is written in a step where fsdp has gathered it, so the write would "
                f"be lost; write in a hook such as on_train_batch_end, {self._instead}or use strategy=ddp. If the "
                f"first batch alone sets it, {FIRST_STEP_ALONE}"
            )


def _is_in_place(param: Any) -> bool:
    """Return whether the module has this parameter, sharded or gathered, and no other tensor in its place."""
    info, gathered = param._module_info, getattr(param, "_unsharded_param", None)
    return any(info.module._parameters.get(info.param_name) is one for one in (param.sharded_param, gathered))


@torch.no_grad()
def _differ(params: Iterable[Any]) -> list[bool]:
    """Return which gathered parameters differ from their shards on any rank. Collective."""
    pairs = [(_own_part(param), param.sharded_param._local_tensor) for param in params]
    device = pairs[0][0].device
    differ = torch.stack([(own != kept.to(own)).any() for own, kept in pairs]).int().to(device)
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    return [bool(one) for one in differ.tolist()]


def _own_part(param: Any) -> Tensor:
    """Return the gathered elements that this rank's shard holds."""
    whole, dim = local(param._unsharded_param).data, param.fsdp_placement.dim
    chunks = whole.chunk(getattr(param.mesh_info, "shard_mesh_size", 1), dim=dim)
    rank = getattr(param.mesh_info, "shard_mesh_rank", 0)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def groups(module: FSDPModule) -> Iterator[Any]:
    """Yield torch's groups of parameters that a module gathers at once."""
    state = module._get_fsdp_state()
    yield from filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])  # before 2.13: one
