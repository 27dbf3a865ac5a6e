"""Packages that do not go together, told before one of them fails as it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from lightswitch import versions

_INDEX = "https://download.pytorch.org/whl"
_BUILD = re.compile(r"cpu|cu\d+|rocm[\d.]+|xpu")  # PyTorch's own, behind the + of a version


def problems() -> Iterator[str]:
    """Yield a line for a torchvision that is built for another torch: torchmetrics imports it in every run."""
    found = versions.of(("torch", "torchvision"))
    if len(found) == 2:
        yield from apart(found, versions.required_by("torchvision"))


def apart(found: Mapping[str, str], requirements: Sequence[str]) -> Iterator[str]:
    """Yield a line where torch and torchvision are not built for one another.

    Args:
        found: their versions.
        requirements: torchvision's.
    """
    torch, _, build = found["torch"].partition("+")
    build_of_vision = found["torchvision"].partition("+")[2]
    needed = next((one[1] for text in requirements if (one := re.match(r"torch *\(?== *([\d.]+)", text))), None)
    of_another = needed is not None and torch.split(".")[:2] != needed.split(".")[:2]
    is_known = all(not one or _BUILD.fullmatch(one) for one in (build, build_of_vision))
    if not of_another and (not is_known or build == build_of_vision):
        return
    major, minor = (int(number) for number in torch.split(".")[:2])
    wanted = f"torchvision==0.{minor + 15}.*" if major == 2 else "torchvision"  # 2.8 and 0.23, and so on
    index = f" --index-url {_INDEX}/{build}" if _BUILD.fullmatch(build) else ""
    kind = f"torch {needed}" if of_another else f"a torch {f'of {build_of_vision}' if build_of_vision else 'of PyPI'}"
    yield (
        f"torchvision {found['torchvision']} is built for {kind}, and torch {found['torch']} is installed; type "
        f"pip install --force-reinstall --no-deps '{wanted}'{index}"
    )
