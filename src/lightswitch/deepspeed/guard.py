"""What a module does to an engine's weights that DeepSpeed would lose: writes, reads of shards, and uneven use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightswitch.collectives import of_ranks
from lightswitch.deepspeed.state import parts
from lightswitch.errors import Refused, listed

_COMPARED_PASSES = 10  # backward passes in which ranks compare which parameters they use
_OWN = ("deepspeed.", "lightswitch.")  # whose functions gather and free weights, or read shards
_METADATA = {  # attributes and methods of a tensor that do not access its values
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "layout", "is_sparse")
} | {getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")}
_METADATA |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_}


class WeightGuard:
    """Checks of the accesses of hooks and steps to a DeepSpeed engine's weights, which are refused where they are lost.

    DeepSpeed steps a copy of the weights, and overwrites them from it. At stage 3, it also frees a weight between its
    uses, unless the weight is small: code that reads or writes it then gets an empty tensor, without an error.

    Args:
        engine: DeepSpeed's engine.
        module: the model.
        sees_steps: whether the steps can be examined at stage 3; compiled ones can't.
    """

    def __init__(self, engine: Any, module: nn.Module, sees_steps: bool) -> None:
        found = [(name, parameter, part) for name, parameter, part in parts(engine, module) if part is not None]
        self._is_in_parts, self._sees_steps = engine.zero_optimization_stage() == 3, sees_steps
        self._parameters = {name: parameter for name, parameter, _ in found}
        self._parts = {name: part for name, _, part in found}
        self._names = {id(parameter): name for name, parameter, _ in found}
        # at stages 1 and 2, the tensors to which DeepSpeed copies the weights after a step
        self._views = {} if self._is_in_parts else {name: one.data for name, one in self._parameters.items()}

    @contextmanager
    def in_hook(self, hook: str) -> Iterator[Any]:
        """Context of a hook, with its mode.

        Raises:
            Refused: it accesses a weight that this rank does not hold whole, or writes one that the optimizer steps.
        """
        touched: set[str] = set()

        def touch(name: str) -> None:
            touched.add(name)
            if not _is_there(self._parameters[name]):
                raise Refused(
                    f"{hook} accesses {name}, of which DeepSpeed's stage 3 holds a shard on each rank; use "
                    "strategy=fsdp, or strategy=deepspeed_stage_2 to read it"
                )

        with _Touches(self._names, touch) as mode:
            yield mode
        self.refuse_written(hook, touched)

    @contextmanager
    def in_step(self, step: str) -> Iterator[None]:
        """Context of a step that is examined, with the checks of `in_hook`.

        At stage 3, gathered weights are compared before DeepSpeed frees them; a compiled step is not seen there.
        """
        if not self._is_in_parts:
            yield
            self.refuse_all_written(step)
        elif not self._sees_steps:
            yield
        else:

            def check(module: nn.Module, *_: Any) -> None:
                self.refuse_written(step, {self._names.get(id(one), "") for one in module.parameters(recurse=False)})

            handle = register_module_forward_hook(check)  # it runs before DeepSpeed's, which free the weights
            with self.in_hook(step):
                yield
            handle.remove()  # no try/finally: an error ends the run

    def refuse_all_written(self, where: str) -> None:
        self.refuse_written(where, self._parts)

    @torch.no_grad()
    def refuse_written(self, where: str, names: Iterable[str]) -> None:
        """Check that weights equal the copy that the optimizer steps.

        Args:
            where: what may have written them.
            names: parameters; those that this rank does not hold whole are left out.

        Raises:
            Refused: one does not.
        """
        there = [name for name in sorted(names) if name in self._parts and _is_there(self._parameters[name])]
        differ = torch.stack([self._differs(name) for name in there]).tolist() if there else []
        if written := [name for name, is_written in zip(there, differ, strict=True) if is_written]:
            raise Refused(
                f"{where} writes {listed(written, 'parameters')}, but DeepSpeed keeps another copy of the weights, "
                "with which it overwrites them after each step; use strategy=fsdp or ddp"
            )

    def _differs(self, name: str) -> Tensor:
        parameter, part = self._parameters[name], self._parts[name]
        own = part.of_whole(parameter.detach())
        if self._is_in_parts:
            kept: Tensor = parameter.ds_tensor.narrow(0, 0, part.elements)  # type: ignore[attr-defined]  # DeepSpeed's
        elif parameter.data_ptr() == self._views[name].data_ptr():
            kept = part.of(part.flat.detach())
        else:  # other `data` was assigned, which no step updates
            return torch.tensor(True, device=own.device)
        kept = kept.to(own)
        return ((kept != own) & ~kept.isnan()).any()


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
                for one in value if type(value) in (list, tuple) else (value,):
                    if id(one) in names and not _caller().startswith(_OWN):
                        self._touch(names[id(one)])
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the name of the module that calls torch's function, past this file's modes, which may be nested."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _is_there(parameter: Any) -> bool:
    """Return whether a parameter is whole on this rank."""
    return not hasattr(parameter, "ds_status") or parameter.ds_status.name == "AVAILABLE"


class ParameterUse:
    """Record of which parameters of the optimizer take part in a step's loss: DeepSpeed steps whole groups.

    Attributes:
        parameters: by name, those that are trained.
        used: those of which the step has computed a gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.used: set[Tensor] = set()
        self._passes = 0

    def unused(self) -> list[str]:
        """Return the names of the parameters that this rank has not used in the step so far."""
        return sorted(name for name, one in self.parameters.items() if one not in self.used)

    def refuse_uneven(self, pass_alone: bool) -> None:
        """Check, in the first passes, that all ranks use the same parameters, before gradients are reduced. Collective.

        Args:
            pass_alone: compare what the backward pass that has begun reaches, whatever earlier ones of the step did.

        Raises:
            Refused: a rank does not use a parameter that another one uses.
        """
        self._passes += 1
        if self._passes > _COMPARED_PASSES or dist.get_world_size() == 1 or dist.get_backend() == "fake":  # planned
            return
        used = set() if pass_alone else self.used
        unreached = {name for name, one in self.parameters.items() if one not in used and not _is_reached(one)}
        everywhere = of_ranks(unreached)
        for rank, its in enumerate(everywhere):
            if missing := sorted(its ^ everywhere[0]):
                raise Refused(
                    f"{listed(missing, 'parameters')} took part in the loss of one of the ranks 0 and {rank}, but not "
                    "of the other, and DeepSpeed reduces the gradients of all ranks together; use the same parameters "
                    "on each rank, or strategy=ddp with trainer.strategy.find_unused_parameters=true"
                )


def _is_reached(parameter: nn.Parameter) -> bool:
    """Return whether the running backward pass will compute a parameter's gradient."""
    return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
