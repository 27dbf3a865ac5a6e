"""Writes to weights outside the optimizer under DeepSpeed, which steps a copy of them, and shards them at stage 3.

A TorchFunctionMode finds the weights that a hook touches, so nothing is gathered for a hook that touches none. At
stage 3, a weight is gathered when a hook first touches it, after ranks have exchanged its name; from then on, it is
gathered before that hook. Touched weights are then copied to the optimizer's copy and to the shards.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightswitch.deepspeed.state import Part, parts
from lightswitch.errors import Refused, listed
from lightswitch.strategies.rounds import FIRST, LATER_SECONDS, Rounds
from lightswitch.strategies.writes import Looks, carried, differing

_STEP = "training_step"
_METADATA = {  # attributes and methods of a tensor that do not access its values
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "layout", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_}


class EngineWrites:
    """Access to a DeepSpeed engine's weights for hooks and steps, with writes carried over to the optimizer's copy.

    Args:
        engine: DeepSpeed's engine.
        module: the model.
        looks: record of the training steps that are examined for writes.
        looks_into_steps: whether training steps can be examined at stage 3; compiled ones can't.
        is_on_disk: whether the weights are offloaded to disk, where hooks can't access them.
        key: prefix of keys in the store, equal on all ranks, and different for each engine.
        timeout_seconds: how long to wait for a rank in the first calls of a hook.
    """

    def __init__(
        self,
        engine: Any,
        module: nn.Module,
        looks: Looks,
        looks_into_steps: bool,
        key: str,
        timeout_seconds: float,
        is_on_disk: bool = False,
    ) -> None:
        self.engine, self._module = engine, module
        self._looks, self._looks_into_steps, self._is_on_disk = looks, looks_into_steps, is_on_disk
        self._rounds = Rounds(key, timeout_seconds, "DeepSpeed's stage 3", "deepspeed_stage_2")
        found = [(name, parameter, part) for name, parameter, part in parts(engine, module)]
        self._names = {id(parameter): name for name, parameter, _ in found}
        self._parameters = {name: parameter for name, parameter, _ in found}
        self._parts = {name: part for name, _, part in found if part is not None}
        self._is_in_parts = engine.zero_optimization_stage() == 3
        of_root = {id(parameter) for parameter in module.parameters(recurse=False)}
        self._of_root = {name for name, parameter, part in found if part is not None and id(parameter) in of_root}
        # at stages 1 and 2, the tensors to which DeepSpeed copies the weights after a step
        self._views = {} if self._is_in_parts else {name: self._parameters[name].data for name in self._parts}
        self._touched_before: dict[str, set[str]] = defaultdict(set)  # names by hook, at stage 3
        self._calls: dict[str, int] = defaultdict(int)
        self._touched: set[str] = set()
        self._gathered: set[str] = set()
        self._depth = 0  # nested forward passes within the body of a training step
        self._touches_in_steps = False  # training steps touch weights outside forward passes
        self._calls_under_way = 0  # nested calls of modules, as in a hook that predicts
        if self._is_in_parts:
            for part in module.modules():  # before and after DeepSpeed's hooks
                part.register_forward_pre_hook(self._begin_call, prepend=True)
                part.register_forward_hook(self._end_call)

    @contextmanager
    def whole_weights(self, hook: str) -> Iterator[None]:
        """Context that gives a hook access to whole weights, and carries over its writes at the end. Collective.

        Raises:
            Refused: at stage 3, one rank touches a weight that others do not touch.
        """
        self._calls[hook] += 1
        self._calls_under_way = 0  # a failed call did not decrement it
        self._gather(self._touched_before[hook])
        with _Touches(self._names, lambda name: self._touch(hook, name)):
            yield
        while self._is_in_parts and self._calls[hook] <= FIRST:
            names = _wanted(self._rounds.agree(hook, None, self._rounds.timeout_seconds))
            if not names:
                break
            self._gather_first(hook, names)  # for another rank, which is still in the hook
        self._let_go()

    @contextmanager
    def in_evaluation(
        self, step: str, trainer: Trainer, whole_weights: Callable[[str], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Context of an evaluation step, which may swap weights for averages.

        Args:
            step: name of the step.
            whole_weights: as in `in_step`.
        """
        if not (self._is_in_parts and self._looks_into_steps):
            yield
            return
        gathering = {name: part for name, part in self._module.named_modules() if part._parameters}
        with whole_weights(step), self._rounds.in_evaluation(step, trainer, gathering):
            yield

    @contextmanager
    def in_step(self, whole_weights: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Context of a training step.

        Args:
            whole_weights: returns a context that opens this object's `whole_weights`, given the name of a hook.
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
                with whole_weights(_STEP) if self._looks.is_due or self._touches_in_steps else nullcontext():
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
        """Release the weights that the training step touched: DeepSpeed gathers and frees the weights of a module."""
        if self._looks.is_at_work and module not in (self.engine, self._module):
            if self._depth == 0 or self._gathered:
                self._let_go()
            self._depth += 1

    def carry_step(self) -> None:
        """Carry over the writes of a training step, at stages 1 and 2, where all weights are whole. Collective."""
        if self._is_in_parts:
            return
        if self._looks.is_due:
            shared = differing(self._parameters)
            self._looks.found(self._carry(self._parts, tells=True), shared)
            return
        self._carry(sorted(self._looks.written))

    def _end_forward(self, module: nn.Module, *_: Any) -> None:
        """Carry over a forward pass's writes to its module's direct parameters, before DeepSpeed frees them."""
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
        """Return which whole parameters the running training step has written, or the last examined one. Collective.

        Raises:
            Refused: see `Looks.found`.
        """
        written = self._looks.written
        if self._looks.is_due and whole:
            differ = torch.stack([self._differs(name) for name in whole]).int()
            dist.all_reduce(differ, dist.ReduceOp.MAX)
            written = {name for name, differs in zip(whole, differ.tolist(), strict=True) if differs}
            self._looks.found(written, differing({name: self._parameters[name] for name in whole if name in written}))
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
        if self._is_on_disk and not _is_there(self._parameters[name]):
            self._refuse(f"{hook} accesses {name}, a weight")
        if is_step and not self._touches_in_steps:
            self._looks.refuse_late({name})
            self._touches_in_steps = True
        self._touched.add(name)
        while not _is_there(self._parameters[name]):
            is_first = self._calls[hook] <= FIRST
            seconds = self._rounds.timeout_seconds if is_first else min(LATER_SECONDS, self._rounds.timeout_seconds)
            self._gather_first(hook, _wanted(self._rounds.agree(hook, name, seconds)))

    def _refuse(self, found: str) -> None:
        raise Refused(
            f"{found}, which DeepSpeed holds on disk between its uses; use strategy=deepspeed_stage_3_offload"
        )

    def _is_at_hand(self, name: str, is_step: bool) -> bool:
        """Return whether DeepSpeed has gathered a weight for a running module.

        In an examined training step, small weights that DeepSpeed always holds whole also count.
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
                    f"{listed(absent)} is accessed while DeepSpeed's stage 3 gathers it for the next module; access it "
                    "before any module is called, or use strategy=deepspeed_stage_2"
                )

    def _let_go(self) -> None:
        """Carry over writes to touched weights, and free the gathered ones."""
        if self._looks.is_at_work:  # these are whole on every rank, no matter which rank touched them
            self._share([name for name in sorted(self._gathered | self._of_root) if _is_there(self._parameters[name])])
        self._carry(sorted(self._touched))
        for name in sorted(self._gathered):
            parameter: Any = self._parameters[name]
            if _is_there(parameter) and not parameter.ds_active_sub_modules:  # else DeepSpeed frees it later
                parameter.partition()
        self._touched.clear()
        self._gathered.clear()

    @torch.no_grad()
    def _carry(self, names: Iterable[str], tells: bool = False) -> set[str]:
        """Carry writes over to the optimizer's copy.

        Args:
            names: parameters that may have been written.
            tells: return the names of those that were written on any rank; collective. Otherwise, return none.
        """
        names = [name for name in names if name in self._parts]
        if self._is_on_disk:
            written = [name for name in names if _is_there(self._parameters[name]) and self._differs(name)]
            if written:
                self._refuse(f"{listed(written)} is written outside of the optimizer, but is a copy of a weight")
            return set()
        changed = [self._carry_one(self._parameters[name], self._parts[name], self._views.get(name)) for name in names]
        if not tells or not changed:
            return set()
        on_any = torch.stack([one.to(changed[0].device) for one in changed]).int().to(self.engine.device)
        dist.all_reduce(on_any, dist.ReduceOp.MAX)
        return {name for name, one in zip(names, on_any.tolist(), strict=True) if one}

    def _carry_one(self, parameter: nn.Parameter, part: Part, view: Tensor | None) -> Tensor:
        if view is not None and parameter.data_ptr() != view.data_ptr():  # other `data` was assigned
            view.copy_(parameter)
            parameter.data = view
        if not self._is_in_parts:
            return carried(part.of_whole(parameter.detach()), part.of(part.flat.detach()))
        own: Tensor = parameter.ds_tensor.narrow(0, 0, part.elements)  # type: ignore[attr-defined]  # DeepSpeed's
        if _is_there(parameter):  # else the hook gathered and freed it itself
            own.copy_(part.of_whole(parameter.detach()))
        return carried(own, part.of(part.flat.detach()))


class _Touches(TorchFunctionMode):
    """Mode that reports the parameters among the arguments of torch's functions, before each call.

    Args:
        names: parameter names by the parameter's `id`.
        touch: called with the name of each such parameter.
    """

    def __init__(self, names: Mapping[int, str], touch: Callable[[str], None]) -> None:
        super().__init__()
        self._names, self._touch = names, touch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            names = self._names
            for value in (*args, *kwargs.values()) if kwargs else args:  # runs for each operation of a hook
                if id(value) in names:
                    self._report(names[id(value)], sys._getframe(1))
                elif type(value) in (list, tuple):
                    for one in value:
                        if id(one) in names:
                            self._report(names[id(one)], sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _report(self, name: str, frame: FrameType) -> None:
        """Report a parameter, unless the caller is DeepSpeed, which gathers and frees it itself."""
        if not frame.f_globals.get("__name__", "").startswith("deepspeed."):
            self._touch(name)


def _wanted(found: Mapping[int, str | None]) -> set[str]:
    return {name for name in found.values() if name is not None}


def _is_there(parameter: Any) -> bool:
    """Return whether a parameter is whole on this rank."""
    return not hasattr(parameter, "ds_status") or parameter.ds_status.name == "AVAILABLE"
