"""Pictures in one style: SVG in a light and a dark form."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import TYPE_CHECKING

from lightswitch import figures
from lightswitch.figures import THEMES, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _draw(figure: Figure, theme: Theme) -> None:
    axes = figure.subplots()
    axes.plot([0, 1], [2, 3], label="a run")
    axes.set_title("loss by step")
    axes.legend()


def test_a_picture_is_svg_in_two_forms_with_its_text_as_text_and_always_the_same(tmp_path: Path) -> None:
    assert figures.picture(_draw, 6, 3) == figures.picture(_draw, 6, 3)
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


def test_text_has_the_contrast_that_wcag_asks_for() -> None:
    """https://www.w3.org/TR/WCAG21/#contrast-minimum: 4.5 for text; areas and lines have text beside them."""
    for theme in THEMES:
        assert all(_contrast(text, theme.background) >= 4.5 for text in (theme.ink, theme.muted))
        assert all(_contrast(color, theme.background) >= 2.2 for color in (*theme.colors, theme.rest))


def _contrast(color: str, background: str) -> float:
    low, high = sorted(map(_luminance, (color, background)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    """Of #rrggbb, which is sRGB: from 0 to 1."""
    shares = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
