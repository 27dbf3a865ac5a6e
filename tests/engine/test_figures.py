"""Pictures in one style: SVG in a light and a dark form."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lightswitch import figures
from lightswitch.figures import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Matrix = tuple[tuple[float, ...], ...]


def _draw(figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    axes.plot([0, 1], [2, 3], label="a run")
    axes.set_title("loss by step")
    axes.legend()


def test_a_picture_is_svg_in_two_forms_with_its_text_as_text(tmp_path: Path) -> None:
    files = figures.picture(_draw, 6, 3, "The loss", "It rises from 2 to 3 & more.").save(tmp_path / "loss.svg")
    assert [path.name for path in files] == ["loss.svg", "loss_dark.svg"]
    for path, theme in zip(files, THEMES, strict=True):
        svg = path.read_text()
        assert {"loss by step", "a run"} <= set(ElementTree.fromstring(svg).itertext())
        assert [part.text for part in list(ElementTree.fromstring(svg))[:2]] == [
            "The loss",
            "It rises from 2 to 3 & more.",
        ]
        assert theme.background in svg
        assert theme.colors[0] in svg


def test_the_same_picture_is_the_same_text() -> None:
    assert figures.picture(_draw, 6, 3) == figures.picture(_draw, 6, 3)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_text_has_the_contrast_that_wcag_asks_for(theme: Theme) -> None:
    """https://www.w3.org/TR/WCAG21/#contrast-minimum: 4.5 for text; areas and lines have text beside them."""
    assert all(_contrast(text, theme.background) >= 4.5 for text in (theme.ink, theme.muted))
    assert all(_contrast(color, theme.background) >= 2.2 for color in (*theme.colors, theme.rest))


# What eyes without one kind of cone see, of linear RGB: Machado, Oliveira, Fernandes 2009, severity 1.0
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))


@pytest.mark.parametrize("sight", [PROTANOPIA, DEUTERANOPIA], ids=["protanopia", "deuteranopia"])
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_colour_blind_tell_the_colours_apart(theme: Theme, sight: Matrix) -> None:
    """0.02 of OKLab's distance is what one can just see; here are four times as much."""
    for one, other in combinations((*theme.colors, theme.rest), 2):
        seen = [_oklab(_times(sight, _linear(color))) for color in (one, other)]
        assert math.dist(*seen) > 0.08, (one, other)


def _linear(color: str) -> tuple[float, ...]:
    """Red, green and blue of #rrggbb, which is sRGB, from 0 to 1."""
    shares = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return tuple(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)


def _contrast(color: str, background: str) -> float:
    low, high = sorted(_times(((0.2126, 0.7152, 0.0722),), _linear(one))[0] for one in (color, background))
    return (high + 0.05) / (low + 0.05)


def _oklab(rgb: tuple[float, ...]) -> tuple[float, ...]:
    """https://bottosson.github.io/posts/oklab/"""
    cones = _times(
        (
            (0.41222147, 0.53633254, 0.05144599),
            (0.21190350, 0.68069955, 0.10739696),
            (0.08830246, 0.28171884, 0.62997870),
        ),
        tuple(min(1.0, max(0.0, share)) for share in rgb),
    )
    return _times(
        (
            (0.21045426, 0.79361779, -0.00407205),
            (1.97799850, -2.42859221, 0.45059371),
            (0.02590404, 0.78277177, -0.80867577),
        ),
        tuple(cone ** (1 / 3) for cone in cones),
    )


def _times(matrix: Matrix, vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
