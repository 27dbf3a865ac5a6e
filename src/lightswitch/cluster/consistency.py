"""Comparison of a run's processes: software versions, code, config and run directory must match."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from lightswitch import versions
from lightswitch.cluster.sealed import HIDDEN
from lightswitch.errors import listed

_PACKAGES = ("lightning", "deepspeed")


@dataclass(frozen=True)
class Evidence:
    """The versions, digests and folder of one process, which it sends to rank 0.

    Args:
        versions: by package.
        code: digests by file.
        config: one digest of all values, with a key that is not sent over the network.
    """

    versions: Mapping[str, str]
    code: Mapping[str, str]
    config: str = ""
    rank: int = 0
    node: str = ""
    run_dir: str = ""
    sees_run_directory: bool = True


ReadValues = Callable[[str], Mapping[str, str] | None]  # maps the digest of a config to its values by key


# Attribute that is compared: the wording of a difference, and what the user can do about it.
_COMPARED = {
    "versions": ("{name} {value}", "install the same version on every node"),
    "code": ("another {name}", "use the same code on every node"),
}


def difference(everyone: Sequence[Evidence], read_values: ReadValues) -> str | None:
    """Return one line with the first difference and the processes that differ; None if all match."""
    for what, (form, fix) in _COMPARED.items():
        if line := _told([(one, getattr(one, what)) for one in everyone], form):
            return f"{line}; {fix}"
    return _other_config([one for one in everyone if one.config], read_values) or _without_run_dir(everyone)


def _other_config(everyone: Sequence[Evidence], read_values: ReadValues) -> str | None:
    kinds = [kind for kind, _ in Counter(one.config for one in everyone).most_common()]
    if len(kinds) < 2:
        return None
    values = {kind: read_values(kind) for kind in kinds[:2]}
    if None in values.values():  # a shared file system lags
        values = {}
    by_key = [(one, values.get(one.config) or {"config": HIDDEN + one.config}) for one in everyone]
    line = _told(by_key, "{name}={value}") or ""
    fix = "overrides, and the same environment" if "another " in line else "overrides"
    if "${now:" in line:
        return f"{line}; each process reads its clock: type the value, or export it and type ${{oc.env:NAME}}"
    return f"{line}; give every process the same {fix}"


def _without_run_dir(everyone: Sequence[Evidence]) -> str | None:
    blind = [one for one in everyone if not one.sees_run_directory]
    if not blind:
        return None
    if elsewhere := [one for one in blind if one.run_dir != everyone[0].run_dir]:
        named = [(one, {"run directory": one.run_dir}) for one in (everyone[0], elsewhere[0])]
        return f"{_told(named, '{name} {value}')}; start every process in the same folder, with the same run_id"
    verb = "does" if len(blind) == 1 else "do"
    return f"{_who(blind)} {verb} not see what rank 0 writes to the run directory; put it where all nodes can read it"


def _told(had: Sequence[tuple[Evidence, Mapping[str, str]]], form: str) -> str | None:
    kinds = Counter(_frozen(values) for _, values in had).most_common(2)
    if len(kinds) == 1:
        return None
    usual, odd = ([one for one, values in had if _frozen(values) == kind] for kind, _ in kinds)
    here, there = dict(kinds[1][0]), dict(kinds[0][0])
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    unnamed = [name for name in names if "{value}" not in form or _is_hidden(name, here, there)]
    message = listed([f"another {name}" if name in unnamed else _value(name, here, form) for name in names], "others")
    others = _who(usual) if len(usual) == 1 else f"the other {len(usual)}" if len(usual + odd) == len(had) else "most"
    if unnamed == names:
        return f"{_who(odd)} {_have(odd)} {message} than {others}"
    named = listed([_value(name, there, form) for name in names if name not in unnamed], "others")
    return f"{_who(odd)} {_have(odd)} {message}, {others} {_have(usual)} {named}"


def _is_hidden(name: str, *sides: Mapping[str, str]) -> bool:
    return any(values.get(name, "").startswith(HIDDEN) for values in sides)


def _value(name: str, values: Mapping[str, str], form: str) -> str:
    return form.format(name=name, value=values[name]) if name in values else f"no {name}"


def _have(processes: Sequence[Evidence]) -> str:
    return "has" if len(processes) == 1 else "have"


def _frozen(values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def _who(processes: Sequence[Evidence]) -> str:
    """Name processes, as in `rank 3 on node2` or `8 ranks on node2, node4`."""
    nodes = list(dict.fromkeys(one.node for one in processes))
    if len(processes) == 1:
        return f"rank {processes[0].rank} on {nodes[0]}"
    return f"{len(processes)} ranks on {listed(nodes, 'nodes')}"


def software(on_gpu: bool) -> dict[str, str]:
    """Return the versions that all processes must share: Python, torch, Lightning, DeepSpeed and, on GPUs, NCCL."""
    found = {"python": platform.python_version(), "torch": torch.__version__} | versions.of(_PACKAGES)
    if on_gpu:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # untyped in torch
    return found


def digests(roots: Iterable[Path]) -> dict[str, str]:
    """Return digests of the Python and YAML files in some folders, by path relative to the folder's parent."""
    found = {}
    for root in roots:
        for path in sorted(_files(root)):
            name = os.path.relpath(path, root.parent)
            with contextlib.suppress(OSError):  # a link to nothing, such as an editor's lock, or removed by now
                found[name] = hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    return found


def _files(root: Path) -> Iterator[str]:
    """Yield Python and YAML files with os.walk, which takes a third of the time of Path.rglob."""
    if root.is_file():
        yield str(root)
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names if name.endswith((".py", ".yaml")))


def source_folders(target: str) -> list[Path]:
    """Return the folders, or the file, of a dotted name's package; nothing if it was installed, or is missing."""
    spec = find_spec(target.partition(".")[0])
    if spec is None:
        return []
    installed = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    paths = list(spec.submodule_search_locations or [str(spec.origin)])
    return [Path(path) for path in paths if not path.startswith(installed)]
