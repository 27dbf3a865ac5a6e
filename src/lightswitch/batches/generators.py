"""Seeds of random generators: the global ones of Python, NumPy and torch, and those that samplers and datasets keep."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

_MASK = (1 << 64) - 1
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES: tuple[type, ...] = (type(None), bool, int, float, str, bytes, torch.Tensor, np.ndarray, np.generic)
_LEAVES = (*_LEAVES, type, ModuleType, FunctionType, BuiltinFunctionType)
_OF_DATA = (nn.Module, Dataset, DataLoader)
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of torch's, which hold parameters, hooks and submodules
_MOST_OBJECTS = 1000  # that are looked at, for a dataset may hold anything
_MOST_ITEMS = 64  # of a list or dict: a list of transforms is shorter, a list of samples has nothing to seed


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of integers, equal in every process (SplitMix64's finaliser; Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_each(numbers: Sequence[int], *before: int) -> list[int]:
    """Return ``mix(*before, number)`` of each number, computed together."""
    state = np.array([number & _MASK for number in numbers], dtype=np.uint64)
    state += np.uint64((mix(*before) + 0x9E3779B97F4A7C15) & _MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    seeds: list[int] = (state ^ (state >> np.uint64(31))).tolist()
    return seeds


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy and torch's CPU.

    Args:
        device: the device in use, whose generator is seeded as well: CUDA, Apple's MPS, or another backend.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every backend: 20 times slower
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, torch's CPU and a device."""
    of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state(), of_device


def restore_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Restore the states that `generator_states` has returned."""
    of_python, of_numpy, of_torch, of_device = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.random.set_rng_state(of_torch)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)


def own_generators(owner: object) -> list[Any]:
    """Return the generators that an object keeps, at any depth of its attributes, lists, tuples and dicts.

    A dataset has them in its transforms and in the datasets that it is made of, a sampler in the samplers inside of it.
    What belongs to the run, such as a Trainer or a module, and the global generators are left out. The order is that of
    the attributes, nearest first.
    """
    found: list[Any] = []
    seen: set[int] = {id(one) for one in _global_generators()}
    ahead = deque([owner])
    while ahead and len(seen) < _MOST_OBJECTS:
        one = ahead.popleft()
        if id(one) in seen or isinstance(one, _LEAVES):
            continue
        seen.add(id(one))
        if isinstance(one, _KINDS):
            found.append(one)
        elif not is_of_run(one):
            ahead.extend(_parts(one))
    return found


def generators_of_run(module: nn.Module, others: Iterable[Any]) -> list[Any]:
    """Return the generators, each once, that a module, its submodules, and others of the run keep in attributes.

    Args:
        others: callbacks and a data module.
    """
    found = [*_of_module(module), *generators_of(others)]
    return list({id(one): one for one in found}.values())


def _of_module(module: nn.Module) -> list[Any]:
    own = [value for part in module.modules() for name, value in vars(part).items() if name not in _OF_MODULES]
    return [one for value in own if not isinstance(value, nn.Module) for one in own_generators(value)]


def generators_of(objects: Iterable[Any]) -> list[Any]:
    """Return the generators of the user's objects, without those of datasets and loaders: these are seeded where they
    draw."""
    own = [one for one in objects if not type(one).__module__.startswith(("lightning.", "lightswitch."))]
    values = [value for one in own for value in vars(one).values() if not isinstance(value, _OF_DATA)]
    return [generator for value in values for generator in own_generators(value)]


def is_of_run(value: object) -> bool:
    """Return whether an object's class is one of Lightning's, as that of a Trainer, module, data module or callback."""
    return any(kind.__module__.startswith(("lightning.", "pytorch_lightning.")) for kind in type(value).__mro__)


def _global_generators() -> tuple[Any, ...]:
    return torch.default_generator, np.random.mtrand._rand, random._inst


def _parts(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return [*islice(one.values(), _MOST_ITEMS)]
    if isinstance(one, list | tuple | deque):
        return [*islice(one, _MOST_ITEMS)]
    if isinstance(one, functools.partial):
        return one.func, one.args, one.keywords
    if isinstance(one, MethodType):
        return (one.__self__,)
    try:
        return [*object.__getattribute__(one, "__dict__").values()]  # a user's __getattr__ may raise anything
    except AttributeError:
        return ()


def seed_own(generators: Sequence[Any], seed: int) -> None:
    """Seed the generators that a sampler or dataset keeps, each by a seed of its own, so that they draw unlike numbers.

    Their states would differ by process and after a resume.
    """
    for index, generator in enumerate(generators):
        _seed(generator, mix(seed, index) if index else seed)


def _seed(generator: object, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(seed)


def restoring(generator: Any) -> Callable[[], None]:
    """Return a function that puts a generator back into the state that it is in now."""
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())
