"""Writes to weights outside of the optimizer under DeepSpeed, which steps a copy, and at stage 3 keeps parts of them.

What a hook touches is seen by torch's own hook on its functions, so that hooks which leave weights alone cost nothing.
At stage 3 a weight is gathered where a hook touches it first, once ranks have told each other which; from then on it is
gathered before that hook. What a hook has touched is carried to the copy that is stepped, and to the parts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightswitch.deepspeed.state import Part, parts
from lightswitch.errors import Refused, listed
from lightswitch.strategies.writes import Looks, carried, share, take_rank_0s

_FIRST = 3  # calls of a hook after which ranks wait for one another, so that one rank alone may read a weight
_LATER_SECONDS = 60.0  # that a rank waits in a later call for the others to touch the same weight
_STEP = "training_step"
_METADATA = {  # of a tensor, which are not its values
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "layout", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_}


class EngineWrites:
    """Weights of a DeepSpeed engine at hand, and what was written to them carried to what it steps.

    Args:
        engine: DeepSpeed's.
        module: the model.
        looks: at training steps.
        looks_into_steps: a training step may be looked into; not one that is compiled.
        key: the same on all ranks, and another for each engine.
        timeout_seconds: to wait for a rank in the first calls of a hook.
    """

    def __init__(
        self, engine: Any, module: nn.Module, looks: Looks, looks_into_steps: bool, key: str, timeout_seconds: float
    ) -> None:
        self.engine, self._module = engine, module
        self._looks, self._looks_into_steps = looks, looks_into_steps
        self._rounds = _Rounds(key, timeout_seconds)
        found = [(name, parameter, part) for name, parameter, part in parts(engine, module)]
        self._names = {id(parameter): name for name, parameter, _ in found}
        self._parameters = {name: parameter for name, parameter, _ in found}
        self._parts = {name: part for name, _, part in found if part is not None}
        self._is_in_parts = engine.zero_optimization_stage() == 3
        of_root = {id(parameter) for parameter in module.parameters(recurse=False)}
        self._of_root = {name for name, parameter, part in found if part is not None and id(parameter) in of_root}
        # at stages 1 and 2, where DeepSpeed puts the weights that it has stepped
        self._views = {} if self._is_in_parts else {name: self._parameters[name].data for name in self._parts}
        self._touched_before: dict[str, set[str]] = defaultdict(set)  # at stage 3, by hook
        self._calls: dict[str, int] = defaultdict(int)
        self._touched: set[str] = set()
        self._gathered: set[str] = set()
        self._depth = 0  # of forward passes within the body of a training step
        self._touches_in_steps = False  # training steps touch weights outside of these
        self._calls_under_way = 0  # of modules, as in a hook that predicts
        if self._is_in_parts:
            for part in module.modules():  # before DeepSpeed's hooks, and after them
                part.register_forward_pre_hook(self._begin_call, prepend=True)
                part.register_forward_hook(self._end_call)

    @contextmanager
    def at_hand(self, hook: str) -> Iterator[None]:
        """Context in which a hook finds whole weights, and after which what it wrote is carried. Collective.

        Raises:
            Refused: at stage 3, one rank touches a weight that the others do not.
        """
        self._calls[hook] += 1
        self._calls_under_way = 0  # one that failed has not told its end
        self._gather(self._touched_before[hook])
        with _Touches(self._names, lambda name: self._touch(hook, name)):
            yield
        while self._is_in_parts and self._calls[hook] <= _FIRST:
            names = self._rounds.agree(hook, None, self._rounds.timeout_seconds)
            if not names:
                break
            self._gather_first(hook, names)  # for another rank, which is at work in the hook
        self._let_go()

    def in_evaluation(
        self, step: str, at_hand: Callable[[str], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return the context of a step of an evaluation, which may put averages in the place of weights.

        Args:
            step: its name.
            at_hand: as for `in_step`.
        """
        return at_hand(step) if self._is_in_parts and self._looks_into_steps else nullcontext()

    @contextmanager
    def in_step(self, at_hand: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of a training step.

        Args:
            at_hand: returns a context in which this object's own `at_hand` is open.
        """
        if not self._is_in_parts:
            yield
            self.carry_step()
        elif self._looks_into_steps and (self._looks.is_due or self._looks.written or self._touches_in_steps):
            self._depth = 1
            handles = [
                register_module_forward_pre_hook(self._begin_forward),
                register_module_forward_hook(self._end_forward),
                self._module.register_forward_pre_hook(self._begin_body),  # after DeepSpeed's
            ]
            try:
                with at_hand(_STEP) if self._looks.is_due or self._touches_in_steps else nullcontext():
                    yield
            finally:
                for handle in handles:
                    handle.remove()
        else:
            yield

    def _begin_call(self, *_: Any) -> None:
        if not self._looks.is_at_work and self._touched:
            self._let_go()
        self._calls_under_way += 1

    def _end_call(self, *_: Any) -> None:
        self._calls_under_way -= 1

    def _begin_body(self, *_: Any) -> None:
        self._depth = 0

    def _begin_forward(self, module: nn.Module, *_: Any) -> None:
        """Let go of what the training step has touched: DeepSpeed gathers and frees what a module needs."""
        if self._looks.is_at_work and module not in (self.engine, self._module):
            if self._depth == 0 or self._gathered:
                self._let_go()
            self._depth += 1

    def carry_step(self) -> None:
        """Carry what a training step wrote, where all weights are whole. Collective."""
        if self._is_in_parts:
            return
        written, shared = self._looks.written, self._looks.shared
        if self._looks.is_due:
            shared = share(self._parameters)
            written = self._carry(self._parts, tells=True)
            self._looks.found(written | shared, shared)
            return
        if shared:
            take_rank_0s(self._parameters[name] for name in sorted(shared))
        self._carry(sorted(written))

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        """Carry what a module's forward pass wrote to its own parameters, before DeepSpeed frees them."""
        if not self._looks.is_at_work or module is self.engine:
            return
        if module is self._module:
            self._let_go()
            self._depth = 1
        else:
            self._depth -= 1
        names = (self._names.get(id(parameter)) for parameter in module.parameters(recurse=False))
        own = [name for name in names if name is not None and _is_there(self._parameters[name])]
        written = self._share(own)
        self._carry([name for name in own if name in written])

    def _share(self, whole: Sequence[str]) -> set[str]:
        """Give all ranks rank 0's values of parameters that are whole, if they are written from shares of the batch,
        and return the names of what a training step writes. Collective."""
        written, shared = self._looks.written, self._looks.shared
        if self._looks.is_due and whole:
            differ = torch.stack([self._differs(name) for name in whole]).int()
            dist.all_reduce(differ, dist.ReduceOp.MAX)
            written = {name for name, differs in zip(whole, differ.tolist(), strict=True) if differs}
            self._looks.found(written, share({name: self._parameters[name] for name in whole if name in written}))
        elif again := [self._parameters[name] for name in whole if name in shared]:
            take_rank_0s(again)
        return written

    def _differs(self, name: str) -> Tensor:
        parameter, part = self._parameters[name], self._parts[name]
        own = part.of_whole(parameter.detach())
        kept: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
        return (own != kept.narrow(0, 0, part.elements).to(own.device)).any()

    # Weights that are touched

    def _touch(self, hook: str, name: str) -> None:
        is_step = hook.startswith(_STEP)
        if (self._depth if is_step else self._calls_under_way) and self._is_at_hand(name, is_step):
            return
        if is_step and not self._touches_in_steps:
            self._looks.refuse_late({name})
            self._touches_in_steps = True
        self._touched.add(name)
        while not _is_there(self._parameters[name]):
            is_first = self._calls[hook] <= _FIRST
            seconds = self._rounds.timeout_seconds if is_first else min(_LATER_SECONDS, self._rounds.timeout_seconds)
            self._gather_first(hook, self._rounds.agree(hook, name, seconds))

    def _is_at_hand(self, name: str, is_step: bool) -> bool:
        """Return whether DeepSpeed has gathered a weight for a module that is called.

        In a training step, which is looked into, small ones also count that DeepSpeed keeps whole.
        """
        parameter: Any = self._parameters[name]
        is_there = _is_there(parameter) if is_step else bool(parameter.ds_active_sub_modules)
        return is_there and name not in self._gathered

    def _gather_first(self, hook: str, names: set[str]) -> None:
        self._touched_before[hook] |= names
        self._touches_in_steps |= hook.startswith(_STEP)
        self._gather(names)

    def _gather(self, names: Iterable[str]) -> None:
        absent = [name for name in sorted(names) if not _is_there(self._parameters[name])]
        if absent:
            parameters: list[Any] = [self._parameters[name] for name in absent]
            parameters[0].all_gather(param_list=parameters)
            self._gathered.update(absent)
            if not all(map(_is_there, parameters)):
                raise Refused(
                    f"{listed(absent)} is touched where DeepSpeed's stage 3 gathers it for the next module already; "
                    "touch it before any module is called, or use strategy=deepspeed_stage_2"
                )

    def _let_go(self) -> None:
        """Carry what was touched, and free what was gathered."""
        if self._looks.is_at_work:  # these are whole on every rank, whichever has touched them
            self._share([name for name in sorted(self._gathered | self._of_root) if _is_there(self._parameters[name])])
        self._carry(sorted(self._touched))
        for name in sorted(self._gathered):
            parameter: Any = self._parameters[name]
            if _is_there(parameter) and not parameter.ds_active_sub_modules:  # else DeepSpeed frees it, at their end
                parameter.partition()
        self._touched.clear()
        self._gathered.clear()

    @torch.no_grad()
    def _carry(self, names: Iterable[str], tells: bool = False) -> set[str]:
        """Carry writes to what is stepped, and return which these are, on any rank, if that is asked for."""
        names = [name for name in names if name in self._parts]
        changed = [self._carry_one(self._parameters[name], self._parts[name], self._views.get(name)) for name in names]
        if not tells or not changed:
            return set()
        on_any = torch.stack([one.to(changed[0].device) for one in changed]).int().to(self.engine.device)
        dist.all_reduce(on_any, dist.ReduceOp.MAX)
        return {name for name, one in zip(names, on_any.tolist(), strict=True) if one}

    def _carry_one(self, parameter: nn.Parameter, part: Part, view: Tensor | None) -> Tensor:
        if view is not None and parameter.data_ptr() != view.data_ptr():  # it was assigned other `data`
            view.copy_(parameter)
            parameter.data = view
        if not self._is_in_parts:
            return carried(part.of_whole(parameter.detach()), part.of(part.flat.detach()))
        own: Tensor = parameter.ds_tensor.narrow(0, 0, part.elements)  # type: ignore[attr-defined]  # DeepSpeed's
        if _is_there(parameter):  # else a hook has gathered it itself, and let go of it
            own.copy_(part.of_whole(parameter.detach()))
        return carried(own, part.of(part.flat.detach()))


class _Touches(TorchFunctionMode):
    """Tells of parameters that torch's functions are called with, before they are.

    Args:
        names: by the id of a parameter.
        touch: called with a name.
    """

    def __init__(self, names: Mapping[int, str], touch: Callable[[str], None]) -> None:
        super().__init__()
        self._names, self._touch = names, touch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            names = self._names
            for value in (*args, *kwargs.values()) if kwargs else args:  # for each operation of a hook: kept short
                if id(value) in names:
                    self._tell(names[id(value)], sys._getframe(1))
                elif type(value) in (list, tuple):
                    for one in value:
                        if id(one) in names:
                            self._tell(names[id(one)], sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _tell(self, name: str, frame: FrameType) -> None:
        """Tell of a parameter, unless DeepSpeed itself is at work, which gathers and frees it."""
        if not frame.f_globals.get("__name__", "").startswith("deepspeed."):
            self._touch(name)


class _Rounds:
    """Rounds in which ranks tell each other what they touch, by way of the store where they met.

    Args:
        key: the same on all ranks.
        timeout_seconds: to wait for a rank that is at work in the same hook.
    """

    def __init__(self, key: str, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._store = PrefixStore(f"writes/{key}", _get_default_store())
        self._round = 0

    def agree(self, hook: str, wanted: str | None, seconds: float) -> set[str]:
        """Return what any rank wants to touch in a hook.

        Args:
            wanted: by this rank; None once its hook is over.

        Raises:
            Refused: another rank is not in the hook.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return {wanted} if wanted is not None else set()
        self._round += 1
        self._store.set(f"{self._round}/{rank}", json.dumps([hook, wanted]))
        self._store.delete_key(f"{self._round - 2}/{rank}")  # no rank is so far behind
        found: set[str] = set()
        for other in range(world_size):
            key = f"{self._round}/{other}"
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except Exception as error:  # torch's classes for it differ by version
                raise _refusal(hook, wanted, rank, other) from error
            its_hook, its_wanted = json.loads(self._store.get(key))
            if its_hook != hook:
                raise _refusal(hook, wanted, rank, other)
            found |= {its_wanted} if its_wanted is not None else set()
        return found


def _refusal(hook: str, wanted: str | None, rank: int, other: int) -> Refused:
    return Refused(
        f"{hook} touches {wanted or 'weights'} on rank {rank} and not on rank {other}, and DeepSpeed's stage 3 keeps "
        "a part on each; touch it on all ranks, or use strategy=deepspeed_stage_2"
    )


def _is_there(parameter: Any) -> bool:
    """Return whether a parameter is whole on this rank."""
    return not hasattr(parameter, "ds_status") or parameter.ds_status.name == "AVAILABLE"
