"""Config nodes that name code: whether they do, and their arguments, as `inspect` reads them once it is imported."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hydra._internal.utils import _locate
from omegaconf import DictConfig, OmegaConf

from lightswitch.config import aliases
from lightswitch.errors import listed, nearest

# Keys of nodes that the engine reads, and that are not arguments of the node's code
ENGINE_KEYS = {"data": ("sharded_by",), "cluster": ("launcher",)}
GIVEN = ("optimizer", "scheduler")  # groups of the config that a model may take as an argument of the same name
_HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
_SCHEDULES = "torch.optim.lr_scheduler."  # called with the optimizer, and nothing else
_OF_DDP = ("process_group_backend", "timeout_seconds")  # other options that people know are fsdp's
_OF_BEFORE = (  # a project's config was made with another version of the engine
    "; if the config is of an earlier version, python -m lightswitch.fork NAME --since COMMIT prints what changed in it"
)
OF_PYTORCH_LIGHTNING = (
    "; in the file that defines it, write import lightning.pytorch as pl for import pytorch_lightning as pl"
)
_HINTS = {  # what to type, by a word of an import's error
    "pytorch_lightning": OF_PYTORCH_LIGHTNING,
    "torchvision::": "; it is built for another torch; type pip install --force-reinstall torch torchvision, with the "
    "--index-url of that torch",
}
_NONE = inspect.Parameter.empty
_IN_A_CONFIG = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SIMPLE = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Parameter:
    """Parameter of a function.

    Attributes:
        value: its default; `inspect.Parameter.empty` if there is none.
        annotation: text of its annotation; empty if there is none.
        kinds: types that its annotation allows; None if it allows anything.
        literals: values of typing.Literal that its annotation allows; None if it allows anything.
    """

    name: str
    value: object
    annotation: str
    kinds: frozenset[type] | None
    literals: frozenset[object] | None

    @property
    def default(self) -> str | None:
        """Text of the default; None if there is none."""
        if self.value is _NONE:
            return None
        return str(getattr(self.value, "__name__", repr(self.value)))  # the repr of a function has its address


@dataclass(frozen=True)
class Signature:
    """Parameters of a function or of a class's constructor.

    Attributes:
        parameters: by name, in order.
        required: names of the parameters without a default.
        open_ended: whether it also accepts any other keyword (**kwargs).
        docstrings: of the constructor, its class and its bases, nearest first; or of the function.
        passed_on: names of those that a constructor with **kwargs may pass on to a base's.
    """

    parameters: dict[str, Parameter]
    required: frozenset[str]
    open_ended: bool
    docstrings: tuple[str, ...]
    passed_on: frozenset[str] = frozenset()


@functools.cache
def signature(target: str) -> Signature | None:
    """Return the signature of the class or function at a dotted path.

    None if it is not written in Python, or its module's code fails, which says why when it is made.

    Raises:
        LookupError: the module does not exist, does not define the name, or imports what is not there.
    """
    found = _located(target)
    classes = [one for one in found.__mro__ if one is not object] if isinstance(found, type) else []
    constructors = [vars(one)["__init__"] for one in classes if "__init__" in vars(one)]
    described = (*constructors[:1], *classes) if classes else (found,)
    skipped = 1 if constructors else 0  # self
    try:
        own, is_open_ended = _parameters(constructors[0] if constructors else found, skipped)
        every, goes_on = own, is_open_ended
        for constructor in constructors[1:]:  # a base's may get the **kwargs
            if goes_on:
                of_base, goes_on = _parameters(constructor, skipped)
                every = every | {name: one for name, one in of_base.items() if name not in every}
    except (TypeError, ValueError):
        return None
    return Signature(
        parameters=every,
        required=frozenset(name for name, one in own.items() if one.value is _NONE),
        open_ended=is_open_ended,
        docstrings=tuple(dict.fromkeys(inspect.cleandoc(one.__doc__) for one in described if one.__doc__)),
        passed_on=frozenset(every.keys() - own.keys()),
    )


def parameters(target: str) -> dict[str, Parameter]:
    """Return the parameters of the code at a dotted path, which is imported; empty if there is no such code."""
    try:
        found = signature(target)
    except LookupError:
        return {}
    return found.parameters if found else {}


def _located(target: str) -> Any:
    """Return what a dotted path names; None if the module's code fails, whose traceback the run prints when it starts.

    Raises:
        LookupError: there is no such module, or it has no such name, or Python can't read it, or what it imports.
    """
    try:
        return _locate(target)
    except (ImportError, ValueError) as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{target}.".startswith(f"{cause.name}."):
            parent, _, name = str(cause.name).rpartition(".")
            is_module = not parent or (cause.name != target and hasattr(sys.modules.get(parent), "__path__"))
            raise LookupError(f"there is no module {cause.name}" if is_module else f"{parent} has no {name}") from None
        if isinstance(cause, SyntaxError):
            raise LookupError(f"Python can't read {cause.filename}: {cause}") from None
        if isinstance(cause, ImportError) or "torchvision::" in str(cause):
            hint = next((hint for word, hint in _HINTS.items() if word in str(cause)), "")
            raise LookupError(f"importing it fails: {cause}{hint}") from None
        if "is an attribute of" in str(error):
            raise LookupError(str(cause)) from None
        return None


def _parameters(function: Callable[..., Any], skipped: int) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters of a function that a config can give, and whether it takes any other keyword."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    every = [*inspect.signature(function).parameters.values()][skipped:]
    given = {one.name: _parameter(one, names) for one in every if one.kind in _IN_A_CONFIG}
    return given, any(one.kind is inspect.Parameter.VAR_KEYWORD for one in every)


def _parameter(one: inspect.Parameter, names: dict[str, Any]) -> Parameter:
    hint = None if one.annotation is _NONE else one.annotation
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint) if hint is not None else ""
    if isinstance(hint, str):
        try:
            hint = eval(hint, names)
        except Exception:  # a description, or a name that is bound for type checkers alone
            hint = None
    allowed = _allowed(hint)
    if allowed is not None and one.default is None:  # `limit: int = None`
        allowed = allowed[0] | {type(None)}, allowed[1]
    return Parameter(one.name, one.default, text, *(allowed or (None, None)))


def _allowed(hint: Any) -> tuple[frozenset[type], frozenset[object]] | None:
    """Return the types and the literals that an annotation allows; None if it allows anything."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return frozenset(), frozenset(inner)
    if origin in (Union, UnionType):
        parts = [_allowed(one) for one in inner]
        known = [part for part in parts if part is not None]
        return (
            None
            if len(known) < len(parts)
            else (frozenset().union(*(kinds for kinds, _ in known)), frozenset().union(*(one for _, one in known)))
        )
    if origin in (list, tuple, Sequence):
        return frozenset({list}), frozenset()
    if origin in (dict, Mapping):
        return frozenset({dict}), frozenset()
    return (frozenset({hint}), frozenset()) if isinstance(hint, type) and hint in _SIMPLE else None


def own_batch(cfg: DictConfig) -> int | None:
    """Return the batch size of the data, or of a model that has the loaders itself: the default of global_batch_size.

    The config's value comes first, then the default of the constructor, once torch is imported: a mistyped key is
    answered before. Return None if there is neither, or if the dataset splits its samples by ranks itself.
    """
    node = next((key for key in ("data", "model") if key in cfg and cfg._get_node(key)), None)
    if node is None or not isinstance(cfg[node], DictConfig) or cfg[node].get("sharded_by") == "dataset":
        return None
    raw: Any = OmegaConf.to_container(cfg[node], resolve=False)
    defaults = parameters(str(raw.get("_target_"))) if "torch" in sys.modules else {}
    for name in aliases.names("global_batch_size"):
        size: object = defaults[name].value if name in defaults else None
        if name in raw:
            size = None if "global_batch_size" in str(raw[name]) else cfg[node][name]  # it may refer to it
        if type(size) is int and size > 0:
            return size
    return None


def unnamed(cfg: dict[str, Any], choices: Mapping[str, Container[str]]) -> Iterator[str]:
    """Yield the nodes of a resolved config that name no code, which needs no import of any.

    Args:
        choices: those of the groups callbacks and logger.
    """
    for key in ("model",) if cfg.get("data") is None else ("model", "data"):
        if not (isinstance(cfg[key], dict) and "_target_" in cfg[key]):
            yield f"{key}: it names no class; type {key}._target_=my.Class, or choose another config"
    for group in choices.keys() & cfg.keys():
        yield from _unfinished_nodes(group, cfg[group] or {}, choices[group])


def _unfinished_nodes(group: str, nodes: Any, choices: Container[str]) -> Iterator[str]:
    if not isinstance(nodes, dict):
        found = f"{group}: found {kinds_in_words((type(nodes),))}, expected a name for each"
        yield f"{found}; type {group}.NAME._target_=my.Class"
        return
    whole = [name for name, node in nodes.items() if node is None or (isinstance(node, dict) and "_target_" in node)]
    for name in (name for name in nodes if name not in whole):
        key, value = next(iter(nodes[name].items()), ("", "")) if isinstance(nodes[name], dict) else ("", "")
        if message := aliases.instead(f"{group}.{name}.{key}", as_typed(value)):
            yield f"{group}.{name}.{key}: there is no such key; {aliases.advice(message)}"
        elif name in choices:
            yield f"{group}.{name} is not switched on. To switch it on: {group}=[default,{name}]"
        else:
            hint = nearest(name, whole, alike=0.65)
            yield f"{group}.{name} names no class.{hint} For your own class: {group}.{name}._target_=my.Class"


def problems(cfg: dict[str, Any], keys: Set[str]) -> Iterator[str]:
    """Yield the arguments that the code named by a config does not accept, and the required ones that are missing.

    Args:
        cfg: resolved config.
        keys: top-level nodes to check, whose code is imported.
    """
    for key in (key for key in cfg if key in keys):
        yield from _node_problems(key, cfg[key], cfg)


def _node_problems(path: str, node: Any, cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a node that names code, and of the nodes inside it."""
    children: Any = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    if not isinstance(node, dict) or node.get("_recursive_", True):  # else the code gets configs of others
        for key, child in children:
            yield from _node_problems(f"{path}.{key}", child, cfg)
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        return
    try:
        accepted = signature(node["_target_"])
    except LookupError as error:
        advice = _OF_BEFORE if node["_target_"].startswith("lightswitch.") else ""
        yield f"{path}._target_={node['_target_']}: {error.args[0]}{advice}"
        return
    if accepted is not None:
        yield from _lacking(path, node, accepted)
        for key in node.keys() - {*_HYDRA_KEYS, *ENGINE_KEYS.get(path, ())}:
            yield from _argument_problems(path, key, node, accepted, cfg)


def _lacking(path: str, node: dict[str, Any], accepted: Signature) -> Iterator[str]:
    is_schedule = str(node["_target_"]).startswith(_SCHEDULES)
    if "_args_" in node or (node.get("_partial_") and not is_schedule):
        return
    for key in accepted.parameters:
        if key in accepted.required and key not in node and not (is_schedule and key == "optimizer"):
            yield f"{path}.{key}: {_short(node)} needs it; give {path}.{key}=VALUE"


def _argument_problems(
    path: str, key: str, node: dict[str, Any], accepted: Signature, cfg: dict[str, Any]
) -> Iterator[str]:
    value, takes = node[key], accepted.parameters.get(key)
    if takes is None:
        yield from _unknown(path, key, node, accepted, cfg)
    elif path == "model" and key in GIVEN and _is_in_pieces(value, takes):
        yield f"{path}.{key}: found {', '.join(value)} but no _target_; type {key}.{next(iter(value))}=VALUE"
    elif key not in accepted.passed_on and not _fits(value, takes):
        literals = sorted({str(literal) for literal in takes.literals or ()})
        hint = nearest(value, literals) if isinstance(value, str) else ""
        expected = ", ".join(filter(None, (*literals, kinds_in_words(tuple(takes.kinds or ())))))
        found = f"{path}.{key}={'null' if value is None else value}: found {kinds_in_words((type(value),))}"
        is_text = set(takes.kinds or ()) - {type(None)} == {str} and type(value) in (int, float)
        quoted = f"; type '{path}.{key}=\"{value}\"'" if is_text else ""
        yield f"{found}, expected {expected}{hint and '.'}{hint}{quoted}"


def _fits(value: Any, takes: Parameter) -> bool:
    if isinstance(value, dict) or takes.kinds is None or takes.literals is None:
        return True
    number = float in takes.kinds and type(value) is int
    return number or type(value) in takes.kinds or value in tuple(takes.literals)  # a list is not hashable


def _is_in_pieces(value: Any, takes: Parameter) -> bool:
    """Return whether overrides such as `model.optimizer.lr=0.1` have replaced `${optimizer}` as an argument's value."""
    takes_dict = re.search(r"dict|mapping|config", takes.annotation + str(takes.default), re.IGNORECASE)
    return isinstance(value, dict) and bool(value) and "_target_" not in value and not takes_dict


def _unknown(path: str, key: str, node: dict[str, Any], accepted: Signature, cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for an argument that the code does not accept.

    Code with **kwargs passes unknown arguments on, often to be ignored silently; for such code, only a likely
    misspelling is refused.
    """
    value = as_typed(node[key])
    argument = aliases.argument(path, key, accepted.parameters)
    other = f"{path}.{argument}" if argument else _of_group(path, key, node, accepted, cfg)
    known = f"{other}={value}" if other else None if accepted.open_ended else aliases.instead(f"{path}.{key}", value)
    option = (known or "").removeprefix("trainer.strategy.").partition("=")[0]
    if known and known.startswith("trainer.strategy.") and option not in accepted.parameters:
        known = f"strategy={'ddp' if option in _OF_DDP else 'fsdp'} {known}"
    if known:
        yield f"{path}.{key}: {_short(node)} takes no {key}; {aliases.advice(known)}"
        return
    own = [one for one in accepted.parameters if one not in accepted.passed_on]
    hint = "" if key in GIVEN else nearest(key, own, alike=0.85 if accepted.open_ended else 0.5)
    if not hint and accepted.open_ended:
        return
    if not hint and own and path in ("model", "data"):
        hint = f" Its arguments: {listed([f'{path}.{one}' for one in own], shown=6)}"
    yield f"{path}.{key}: {_short(node)} takes no {key}.{hint}"


def _of_group(path: str, key: str, node: dict[str, Any], accepted: Signature, cfg: dict[str, Any]) -> str | None:
    """Return the config key that sets an argument known from other models; None if there is none.

    For `model.lr` of a model that takes an optimizer, that is `optimizer.lr`, or `model.optimizer.lr` if the model's
    optimizer is not the config's.
    """
    setting = aliases.setting(key)
    group = (setting or "").partition(".")[0]
    if path != "model" or group not in accepted.parameters:
        return None
    return setting if node.get(group) in (None, cfg.get(group)) else f"{path}.{setting}"


def _short(node: dict[str, Any]) -> str:
    return str(node["_target_"]).rpartition(".")[2]


def kinds_in_words(kinds: tuple[type, ...]) -> str:
    """Return the names of types as a user writes them: null for None."""
    return " or ".join(sorted("null" if kind is type(None) else kind.__name__ for kind in kinds))


def as_typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
