"""SVG pictures in one style, each in a light and a dark form, with colours for the colour-blind.

matplotlib, from the extra `plots`, is imported only when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightswitch import regular_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = "DejaVu Sans"  # comes with matplotlib, and is wider than most: text measured with it fits in other fonts
_FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans'"


@dataclass(frozen=True)
class Theme:
    """Colours of one form of a picture.

    Args:
        ink: of text. muted: of axis tick labels. grid: of grid lines.
        colors: of series, in order; the hues of Okabe and Ito (https://jfly.uni-koeln.de/color/), moved apart
            until each pair, `rest` included, also differs for readers who see no red or no green.
        rest: of remainders and neutral elements.
    """

    name: str
    background: str
    ink: str
    muted: str
    grid: str
    rest: str
    colors: tuple[str, ...]


LIGHT = Theme(
    *("light", "#ffffff", "#1c2128", "#59636e", "#e4e7eb", "#9aa2ad"),
    ("#3660cb", "#f2950f", "#148f59", "#ad6aa8", "#25afff", "#ee440e", "#554772"),
)
DARK = Theme(
    *("dark", "#12161c", "#e6eaef", "#9aa5b1", "#2a313a", "#667080"),
    ("#53a7f7", "#fabe10", "#33b070", "#e0adc1", "#c7e8ff", "#ff6c06", "#8767e7"),
)
THEMES = (LIGHT, DARK)


@dataclass(frozen=True)
class Picture:
    """The two forms of one picture, as complete SVG elements.

    Args:
        title: the subject of the picture, for screen readers.
        description: the content of the picture, for screen readers.
    """

    light: str
    dark: str
    title: str = ""
    description: str = ""

    def save(self, path: Path) -> tuple[Path, Path]:
        """Write `<path>` and, beside it, `<stem>_dark.svg`; return both."""
        dark = path.with_name(f"{path.stem}_dark{path.suffix}")
        regular_files.write_text(path, self._told(self.light))
        regular_files.write_text(dark, self._told(self.dark))
        return path, dark

    def _told(self, svg: str) -> str:
        """Return a form with title and description, for a file; in a page, the title would appear as a tooltip."""
        label = f'<title id="title">{escape(self.title)}</title>\n<desc id="desc">{escape(self.description)}</desc>'
        return svg.replace(">", f' role="img" aria-labelledby="title desc">\n{label}', 1) + "\n"


def missing() -> str | None:
    """Return the line that says what to install if pictures can't be drawn; None if they can."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "pictures are left out: matplotlib is not installed; type pip install -e '.[plots]'"


def picture(
    draw: Callable[[Figure, Theme], None],
    width_inches: float,
    height_inches: float,
    title: str = "",
    description: str = "",
) -> Picture:
    """Draw a picture once in each form.

    Args:
        draw: draws on an empty figure in a theme's colours; text stays text in the SVG.
    """
    light, dark = (_svg(draw, theme, (width_inches, height_inches)) for theme in THEMES)
    return Picture(light, dark, title, description)


def _svg(draw: Callable[[Figure, Theme], None], theme: Theme, size_inches: tuple[float, float]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_settings(theme)):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure, theme)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = "<svg" + text.getvalue().partition("<svg")[2].rstrip()
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # unused, and two pictures on a page share them
    return svg.replace(f"'{_FONT}'", _FONTS)


def _settings(theme: Theme) -> Any:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "lightswitch",  # equal pictures give equal text
        "font.family": "sans-serif",
        "font.sans-serif": [_FONT],
        "font.size": 9.5,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.edgecolor": theme.grid,
        "axes.facecolor": theme.background,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.ink,
        "axes.prop_cycle": f"cycler('color', {list(theme.colors)})",
        "figure.facecolor": theme.background,
        "savefig.facecolor": theme.background,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "text.color": theme.ink,
        "xtick.color": theme.grid,
        "ytick.color": theme.grid,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "lines.linewidth": 1.8,
        "lines.solid_capstyle": "round",
        "legend.frameon": False,
        "legend.labelcolor": theme.ink,
        "patch.edgecolor": theme.background,
    }
