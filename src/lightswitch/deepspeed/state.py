"""Weights and optimizer states of a live DeepSpeed engine, by parameter, and the engine's portable checkpoints.

DeepSpeed's getters and setters fail for several parameter groups at stages 1 and 2 before the first step, and for a
parameter that does not divide evenly over the ranks at stage 3 (0.19). Therefore, this module finds the shards.

With an offload to disk, DeepSpeed writes each flat group of parameters, each of its optimizer states, and each large
parameter that computes to a file of its own, and reads it into a buffer when a step needs it
(deepspeed.runtime.swap_tensor, 0.19). In between, its tensors are empty.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import logging
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightswitch import patches
from lightswitch.checkpoints import names, optimizers
from lightswitch.checkpoints.finetuning import LEFT_OUT
from lightswitch.checkpoints.portable import PortableCheckpoints
from lightswitch.checkpoints.shards import Piece, Stored, local
from lightswitch.deepspeed.config import blocks_on_disk
from lightswitch.errors import Refused
from lightswitch.regular_files import make_tree, remove_tree
from lightswitch.strategies.units import is_compiled

log = logging.getLogger(__name__)

_CAP_IPC_LOCK = 14  # may lock any amount of memory (linux/capability.h)
LOSS_SCALE = "MixedPrecision"  # Lightning's checkpoint key for the state of the GradScaler


def _imported() -> Any:
    """Return the deepspeed package, imported without its warnings about a missing GPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it warns that it found no GPU
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # its autotuner, unused here, would import it for seconds
    try:
        return importlib.import_module("deepspeed")
    finally:
        if modules["mlflow"] is None:
            del modules["mlflow"]


deepspeed = _imported()


@dataclass(frozen=True)
class Part:
    """This rank's shard of a parameter."""

    flat: Tensor  # this rank's shard of a group of parameters, in the optimizer's precision: (elements,)
    begin: int  # index of the first element in `flat`
    first: int  # index of the first element in the parameter, flattened
    elements: int  # 0 if this rank holds no elements of the parameter

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.begin, self.elements)

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1).narrow(0, self.first, self.elements)

    def piece(self, flat: Tensor, parameter: nn.Parameter) -> Piece:
        return Piece(self.of(flat), getattr(parameter, "ds_shape", parameter.shape), self.first)


def pieces(engine: Any, module: nn.Module) -> Iterator[tuple[str, Stored, dict[str, Stored]]]:
    """Yield each parameter's name, and this rank's shards of its weight and of its optimizer state.

    Weights are in the optimizer's precision. The state (exp_avg, …, step) is empty before the first step, and for a
    frozen parameter. Values that are not a Piece are whole on every rank that has them.
    """
    for name, parameter, part in parts(engine, module):
        if part is None:
            yield name, parameter.detach(), {}
            continue
        values = _states(engine).get(part.flat, {})
        state: dict[str, Stored] = {
            key: part.piece(value, parameter) if _is_spread(value, part) else torch.as_tensor(value)
            for key, value in values.items()
        }
        yield name, part.piece(part.flat.detach(), parameter), state


def has_working_copy(engine: Any) -> bool:
    """Return whether the engine trains, so that forward passes compute with a copy of the weights that it steps."""
    return any(hasattr(engine.optimizer, name) for name in ("update_lp_params", "checkpoint_event_prologue"))


def whole_beside_parts(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, by name, that stage 3 holds whole beside their shards, because they are small."""
    parameters = names.parameters(module).items()
    return {name: one.detach() for name, one in parameters if hasattr(one, "ds_tensor") and one.numel()}


def update_working_copy(engine: Any, module: nn.Module) -> None:
    """Update the working copy of every parameter from the optimizer's, as DeepSpeed does after a step. Collective."""
    if engine.zero_optimization_stage() < 3:
        engine.optimizer.update_lp_params()
        return
    engine.optimizer.checkpoint_event_prologue()  # frees gathered parameters
    for _, parameter, part in parts(engine, module):
        if part is not None:
            parameter.ds_tensor.detach().narrow(0, 0, part.elements).copy_(part.of(part.flat.detach()))  # type: ignore[attr-defined]  # DeepSpeed's
    engine.optimizer.checkpoint_event_epilogue()  # gathers the parameters that every device holds whole


def rooms_for_states(engine: Any, module: nn.Module, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Stored]:
    """Return the shards to read optimizer states of trained parameters into, by NAME.KEY, except for scalar states.

    Args:
        saved: tensors with the shapes of a checkpoint's states, by parameter name and state key.
    """
    rooms = dict[str, Stored]()
    for name, parameter, part in parts(engine, module):
        for key, like in saved.get(name, {}).items() if part is not None and parameter.requires_grad else ():
            if part is None or like.dim() == 0:
                continue
            rooms[f"{name}.{key}"] = part.piece(_spread(engine, key, like, part), parameter)
    return rooms


def scatter_states(engine: Any, module: nn.Module, read: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Set the optimizer's states of every parameter.

    Args:
        read: returns the whole states of a parameter by its name.

    Raises:
        Refused: parameters of one group were trained for different numbers of steps.
    """
    states, first = _states(engine), dict[Tensor, tuple[str, int]]()
    for name, parameter, part in parts(engine, module):
        if part is None or not parameter.requires_grad:
            continue
        saved = read(name)
        other, step = first.setdefault(part.flat, (name, int(saved.get("step", 0))))
        _refuse_other_step(name, int(saved.get("step", 0)), other, step)
        for key, value in saved.items():
            if value.dim() == 0 and (key == "step" or _in_full_shape(parameter).dim()):  # one for a whole group
                value = value.float() if key == "step" else value.clone()
                states.setdefault(part.flat, {})[key] = value.to(_device_of_step(engine, part.flat))
                continue
            part.of(_spread(engine, key, value, part)).copy_(part.of_whole(value))
    patches.replace(engine, "global_steps", max((step for _, step in first.values()), default=0))
    if engine.zero_optimization_stage() < 3:  # parameters are still linked to the previous state tensors
        patches.replace(engine.optimizer, "_hp_optimizer_states_linked", False)


def _refuse_other_step(name: str, step: int, other: str, step_of_other: int) -> None:
    if step != step_of_other:
        raise Refused(
            f"{name} was trained in {step} steps and {other}, in the same parameter group, in {step_of_other}, but "
            "DeepSpeed counts steps per group; put them in separate groups, or use strategy=fsdp"
        )


def parts(engine: Any, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Part | None]]:
    """Yield each parameter with its name and this rank's shard.

    The shard is None if every rank holds the parameter whole, and no optimizer steps it. Tensors that are on disk map
    their files until the last one is yielded.
    """
    zero = engine.optimizer
    groups = zip(getattr(zero, "single_partition_of_fp32_groups", ()), getattr(zero, "bit16_groups", ()), strict=True)
    flats = {id(member): flat for flat, group in groups for member in group}
    with mapped(zero, module):
        for name, parameter in names.parameters(module).items():
            yield name, parameter, _part(zero, parameter, flats.get(id(parameter)))


def _part(zero: Any, parameter: nn.Parameter, flat: Tensor | None) -> Part | None:
    """Return this rank's shard of a parameter.

    Args:
        zero: DeepSpeed's optimizer.
        flat: the flat group that holds the parameter at stages 1 and 2, if any.
    """
    rank = dist.get_rank()
    if hasattr(parameter, "ds_tensor"):
        positions, number = getattr(zero, "grad_position", {}), getattr(parameter, "ds_id", None)
        if number in positions:
            group, begin, elements = positions[number]
            flat = zero.fp32_partitioned_groups_flat[group]
        else:
            flat, begin, elements = parameter.ds_tensor.detach(), 0, parameter.ds_tensor.numel()
        first = min(elements * rank, parameter.ds_numel)  # type: ignore[attr-defined]  # DeepSpeed's
        return Part(flat, begin, first, min(elements, parameter.ds_numel - first))  # type: ignore[attr-defined]  # DeepSpeed's
    if flat is None:
        return None
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
    if mapping is None:
        return Part(flat, 0, 0, 0)
    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return Part(flat, here.start, there.start, here.numel)


def _states(engine: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizer's state by flat group, because DeepSpeed makes it step flat groups instead of parameters."""
    states: dict[Tensor, dict[str, Any]] = getattr(getattr(engine.optimizer, "optimizer", None), "state", {})
    return states


def _spread(engine: Any, key: str, like: Tensor, part: Part) -> Tensor:
    """Return a state of the whole flat group, made if there is none; counts and masks have their own dtype."""
    values = _states(engine).setdefault(part.flat, {})
    if not _is_spread(values.get(key), part):
        dtype = part.flat.dtype if like.is_floating_point() else like.dtype
        on_disk = _new_state_on_disk(engine.optimizer, part.flat, key)
        values[key] = torch.zeros_like(part.flat, dtype=dtype, requires_grad=False) if on_disk is None else on_disk
    found: Tensor = values[key]
    return found


def _is_spread(value: object, part: Part) -> bool:
    return isinstance(value, Tensor) and value.shape == part.flat.shape


def _device_of_step(engine: Any, flat: Tensor) -> torch.device:
    """Return the device on which torch's optimizers need their step count."""
    group = engine.optimizer.optimizer.param_groups[0]
    return flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


class PortableDeepSpeed(PortableCheckpoints):
    """Portable checkpoints of a DeepSpeed engine: each rank writes and reads its shards of the flat groups."""

    _group_names: list[list[str]]
    _states: dict[str, dict[str, Stored]]

    def remember_groups(self, optimizer: Optimizer) -> None:
        """Store the parameter names of an optimizer's groups, before DeepSpeed flattens the groups."""
        assert self.lightning_module is not None
        if (message := optimizers.described(optimizer)) != _class(optimizer) and self.is_global_zero:
            log.warning(
                "checkpoints under DeepSpeed omit the state of the inner optimizer of %s: a resumed run starts it from "
                "scratch; use strategy=ddp or fsdp", message,
            )  # fmt: skip
        self._group_names = [group["params"] for group in optimizers.groups_of(optimizer, self.lightning_module)]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().lightning_module_state_dict()
        kept = list(pieces(engine, module))
        self._states = {name: state for name, _, state in kept if state}
        return {**names.state_of(module), **{name: weight for name, weight, _ in kept}}

    def local_parameters(self) -> dict[str, Stored]:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            return super().local_parameters()
        return {name: weight for name, weight, _ in pieces(engine, module)}

    def parameters_changed(self) -> None:
        assert self.lightning_module is not None
        update_working_copy(self.model, self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, which `lightning_module_state_dict`, called before by Lightning, collected."""
        states, self._states = self._states, {}
        return {"class": _class(optimizer), "state": states, "param_groups": self._groups(optimizer)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if scale := loss_scale_of(self._loss_scaler):
            checkpoint[LOSS_SCALE] = scale
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def stage(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return copies of the tensors that this rank writes, but those on disk themselves."""
        on_disk = {name: one for name, one in tensors.items() if local(one).untyped_storage().filename is not None}
        return {**super().stage(names.without(tensors, on_disk)), **on_disk}

    @property
    def _loss_scaler(self) -> Any:
        return getattr(getattr(self.model, "optimizer", None), "loss_scaler", None)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, engine = self.lightning_module, self.model
        assert module is not None
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            super().load_model_state_dict(checkpoint, strict)
            return
        parameters = {name: _in_full_shape(parameter) for name, parameter in names.parameters(module).items()}
        state = {**names.state_of(module), **parameters}
        self.check_model(names.without(state, checkpoint.get(LEFT_OUT, ())), checkpoint, strict)
        loose = names.loose(module, state, self._reader.weights_like)
        self.read("model", names.without(state, {*parameters, *loose}))
        self.read("model", {name: weight for name, weight, _ in pieces(engine, module)})
        if has_working_copy(engine):
            update_working_copy(engine, module)
        else:
            self.read("model", whole_beside_parts(module))
        self.hand_over(checkpoint, loose)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read optimizer states and the loss scale, and restore the saved options of groups."""
        module = self.lightning_module
        assert module is not None
        optimizers.check(self._reader.path, self.described_optimizers(), checkpoint["optimizer_states"])
        saved: dict[str, dict[str, Tensor]] = {}
        for full_name in sorted(self._reader.names("optimizer.0.")):
            name, _, key = full_name.rpartition(".")
            saved.setdefault(name, {})[key] = self._reader.like[f"optimizer.0.{full_name}"]
        rooms = rooms_for_states(self.model, module, saved)
        others = {name: {k: one for k, one in of.items() if f"{name}.{k}" not in rooms} for name, of in saved.items()}
        whole = {name: {k: torch.empty_like(one, device="cpu") for k, one in of.items()} for name, of in others.items()}
        self.read("optimizer.0", {**rooms, **{f"{name}.{k}": one for name in whole for k, one in whole[name].items()}})
        scatter_states(self.model, module, lambda name: whole.get(name, {}))
        resume_loss_scale(self._loss_scaler, checkpoint.get(LOSS_SCALE, {}))
        for group, saved in zip(
            self.optimizers[0].param_groups, checkpoint["optimizer_states"][0]["param_groups"], strict=True
        ):
            group.update(optimizers.options_of(saved))

    def described_optimizers(self) -> list[tuple[str, optimizers.Groups]]:
        return [(_class(optimizer), self._groups(optimizer)) for optimizer in self.optimizers]

    def _groups(self, optimizer: Optimizer) -> optimizers.Groups:
        return [
            {**group, "params": params}
            for group, params in zip(optimizer.param_groups, self._group_names, strict=True)
        ]  # fmt: skip


def _class(optimizer: Any) -> str:
    """Return the class name of the user's optimizer, which DeepSpeed's may wrap."""
    is_torchs = isinstance(optimizer, Optimizer)  # then it is the user's, which may itself wrap another
    return type(optimizer if is_torchs else getattr(optimizer, "optimizer", optimizer)).__name__


def _in_full_shape(parameter: nn.Parameter) -> Tensor:
    return torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")


def loss_scale_of(scaler: Any) -> dict[str, Any]:
    """Return the `GradScaler.state_dict` whose scale grows at the same step; empty if the scale is fixed, or there is
    none.

    Args:
        scaler: a `DynamicLossScaler`, which grows in a step after ``scale_window`` good steps, or a multiple of them;
            GradScaler grows in the step that completes them.
    """
    if not getattr(scaler, "dynamic", False):
        return {}
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (good_steps - 1) % scaler.scale_window if good_steps else -1,
        "hysteresis": scaler.cur_hysteresis,  # overflows tolerated before the scale falls; GradScaler tolerates none
    }


def resume_loss_scale(scaler: Any, state: dict[str, Any]) -> None:
    """Set a scaler to a saved scale and progress to the next growth, if both scales are dynamic.

    The run's config determines by how much and how often the scale grows. DeepSpeed resumes only from its own format.
    """
    if state and getattr(scaler, "dynamic", False):
        scaler.cur_scale = state["scale"]
        scaler.last_overflow_iter = scaler.cur_iter - 2 - state["_growth_tracker"]
        scaler.cur_hysteresis = state.get("hysteresis", scaler.cur_hysteresis)


# Offload to disk


def folder_of(drive: str | Path, run_dir: Path) -> Path:
    """Return the folder of a run on a drive; runs of the same name in other directories have others."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return Path(drive) / f"{run_dir.name}_{digest[:8]}"


def open_folder(folder: Path, rank: int, is_first_of_node: bool) -> None:
    """Make a run's folder, without the files of a killed start, and remove this rank's files when the process ends.

    The other ranks wait for the first of their node.

    Raises:
        Refused: the folder can't be made.
    """
    try:
        if is_first_of_node:
            if folder.is_dir():
                remove_tree(folder)
            with suppress(FileExistsError):  # another node may share the drive
                make_tree(folder)
    except OSError as error:
        raise Refused(f"trainer.strategy.nvme_path={folder.parent}: {error.strerror}; use another folder") from error
    atexit.register(_remove, folder, rank)


def _remove(folder: Path, rank: int) -> None:
    for path in folder.glob(f"**/rank{rank}/**/*"):
        if path.is_file():
            path.unlink(missing_ok=True)
    with suppress(OSError, Refused):  # another rank still has files there, and removes the folder
        for path in sorted(set(folder.glob("**")) - {folder}, reverse=True):
            path.rmdir()
        remove_tree(folder)


def fit_buffers(zero: dict[str, Any], model: nn.Module, ranks: int, copies: int) -> None:
    """Make the buffers for parameters as large as the largest shard of one, and enough of them: DeepSpeed fails if one
    is too small, or if it has none left for a layer that follows another.

    Args:
        zero: the block `zero_optimization` of DeepSpeed's config.
        copies: of a parameter in the optimizer, the weight among them.

    Raises:
        Refused: the process may not lock the memory of the buffers, for which DeepSpeed would abort, or the drive has
            no room for the files: DeepSpeed ignores a write that fails (0.19), and would read back other values.
    """
    shards = [-(-int(getattr(one, "ds_numel", one.numel())) // ranks) for one in model.parameters()]
    elements = 0
    for block in blocks_on_disk(zero):
        is_of_weights = block is zero.get("offload_param")
        if is_of_weights:
            block["buffer_size"] = max(shards)
            most = max(len(list(part.parameters(recurse=is_compiled(part)))) for part in model.modules())
            block["buffer_count"] = max(block.get("buffer_count", 5), 2 * most)
        needed, free = sum(shards) * 4 * (1 if is_of_weights else copies), shutil.disk_usage(block["nvme_path"]).free
        if needed > free:
            raise Refused(
                f"trainer.strategy.nvme_path={block['nvme_path']}: each rank writes {needed / 2**30:.3g} GiB, and "
                f"{free / 2**30:.3g} GiB are free; free some space, or use a folder on another local drive"
            )
        size = max(shards) if is_of_weights else min(sum(shards), zero.get("sub_group_size", 1e9) + max(shards))
        elements += block.get("buffer_count", 5) * size
    limit, needed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], int(elements) * 4
    if resource.RLIM_INFINITY != limit < needed and not _may_lock_memory():
        raise Refused(
            f"each process locks {needed >> 20} MiB of memory to offload to disk, but may lock {limit >> 20} MiB "
            "(ulimit -l); raise memlock in /etc/security/limits.conf, or start the container with --ulimit memlock=-1"
        )


def _may_lock_memory() -> bool:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


@contextmanager
def mapped(zero: Any, module: nn.Module) -> Iterator[None]:
    """Context in which the tensors that DeepSpeed has written to disk have their values: they map the files.

    Views of them remain valid until DeepSpeed writes the files again; what is written into them is in the files.

    Args:
        zero: DeepSpeed's optimizer.
    """
    found: list[tuple[Any, str, int, torch.dtype, Tensor]] = [
        (one.compute_tensor, one.swap_path, info.numel(), zero.optimizer_swapper.dtype, torch.empty(0))
        for info in _groups(zero).values()
        for one in info.tensors
    ]
    weights: list[Any] = [one for one in module.parameters() if _is_on_disk(one)]
    for parameter in weights:
        kept, swapper = parameter.ds_tensor, parameter.nvme_swapper
        found.append((kept, swapper.get_path(parameter), kept.ds_numel, swapper.dtype, swapper.invalid_buffer))
    for tensor, path, elements, dtype, _ in found:
        tensor.data = _map(path, elements, dtype)
    yield  # no try/finally: an error ends the run
    for tensor, *_, placeholder in found:
        tensor.data = placeholder.data  # as DeepSpeed leaves it


def _new_state_on_disk(zero: Any, flat: Tensor, key: str) -> Tensor | None:
    """Return an optimizer state of zeros that maps a new file, for a flat group that is on disk; None for another."""
    info = _groups(zero).get(getattr(flat, "ds_id", None))
    if info is None:
        return None
    tensor: Any = torch.empty(0, dtype=flat.dtype)
    tensor.ds_id = f"{key}-{flat.ds_id}"  # type: ignore[attr-defined]  # as DeepSpeed names it
    info.add_state_tensors([tensor])
    path = info.tensors[-1].swap_path
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, zero.optimizer_swapper._io_aligned_numel(info.numel()) * flat.itemsize)
    tensor.data = _map(path, info.numel(), flat.dtype)
    state: Tensor = tensor
    return state


def _groups(zero: Any) -> dict[Any, Any]:
    """Return what DeepSpeed has on disk of each flat group, by the group's `ds_id`."""
    swapper = getattr(zero, "optimizer_swapper", None)
    return dict(swapper.swap_params_info) if swapper is not None else {}


def _is_on_disk(parameter: Any) -> bool:
    """Return whether this rank's shard of a parameter is in a file alone, after letting go of one read ahead."""
    swapper, kept = getattr(parameter, "nvme_swapper", None), getattr(parameter, "ds_tensor", None)
    if swapper is None or kept is None or kept.final_location != "nvme":
        return False
    swapper.synchronize_reads()
    if parameter.ds_status.name == "NOT_AVAILABLE" and kept.status.name == "AVAILABLE":
        swapper.remove_partition_and_release_buffers([parameter])
    return bool(kept.status.name == "NOT_AVAILABLE")


def _map(path: str, elements: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(path, shared=True, size=elements, dtype=dtype)
