"""Units of a model, sharded, gathered and freed as one: its repeated blocks, or modules that are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightswitch.errors import Refused


def find_units(model: nn.Module, named: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the units of a model by path, outer before inner.

    Args:
        named: class names (``Block``) or paths (``encoder.layers.*``). None: the children of a container that are of
            one class, that is, the blocks of a transformer or the stages of a convolutional network.

    Raises:
        Refused: a name that fits nothing, or a unit that shares parameters with the rest of the model.
    """
    if named is None:
        first = {unit: path for path, unit in reversed([*_repeated(model)])}  # a unit may have other paths beside it
        return {path: unit for path, unit in _repeated(model) if first[unit] == path and _is_separable(model, unit)}
    found = {path: module for path, module in model.named_modules() if path and _fits(path, module, named)}
    for name in named:
        if not any(_fits(path, module, [name]) for path, module in found.items()):
            raise Refused(f"units: {name} is neither a class nor a path in {type(model).__name__}; {_classes(model)}")
    for path, unit in found.items():
        if not _is_separable(model, unit):
            raise Refused(f"units: {path} shares parameters with modules outside of it; name one that holds both")
    return found


def called_parts(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules below a model that have a forward pass, and parameters that no other module shares:
    what a training step calls, where it steps between calls."""
    parts = []
    for child in model.children():
        if _has_forward(child) and _is_separable(model, child) and any(True for _ in child.parameters()):
            parts.append(child)
        else:
            parts += called_parts(child)
    return parts


def _repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that a container repeats, with their paths."""
    classes = Counter(type(child) for child in module.children() if _has_matrix(child))
    for name, child in module.named_children():
        is_unit = _is_container(module) and classes[type(child)] > 1 and _has_matrix(child) and _has_forward(child)
        if is_unit:
            yield path + name, child
        else:
            yield from _repeated(child, f"{path}{name}.")


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass to hook onto, which a mere list of modules has not."""
    return type(module).forward is not nn.Module.forward


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a matrix; a norm's few numbers are not worth a collective of their own."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _is_separable(model: nn.Module, unit: nn.Module) -> bool:
    """Return whether a unit shares no parameter with other modules; tied ones are gathered by a module around both."""
    inside, everywhere = _held(unit), _held(model)
    return all(everywhere[parameter] == times for parameter, times in inside.items())


def _held(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for part in module.modules() for _, parameter in part.named_parameters(recurse=False))


def _fits(path: str, module: nn.Module, names: Sequence[str]) -> bool:
    return any(name == type(module).__name__ or fnmatchcase(path, name) for name in names)


def _classes(model: nn.Module) -> str:
    classes = sorted({type(module).__name__ for module in model.modules() if _has_matrix(module)})
    return f"its classes are {', '.join(classes)}"
