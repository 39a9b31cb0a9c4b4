"""How models look in every plot, and the colours of plots on light and on dark paper."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Okabe and Ito's hues, safe for the colour-blind, with darker and lighter neighbours: on light paper, on dark paper.
COLOURS = {
    "ink": ("#1b1f24", "#f0f3f6"),
    "orange": ("#d55e00", "#ff8c42"),
    "green": ("#009e73", "#2fd6a3"),
    "blue": ("#0072b2", "#4cb0f5"),
    "amber": ("#e0a100", "#ffd966"),
    "pink": ("#cc79a7", "#ff9ed2"),
    "sky": ("#56b4e9", "#a5dcff"),
    "plum": ("#7e3f66", "#c58af9"),
    "brown": ("#6f4a00", "#b58a4a"),
    "navy": ("#003f70", "#7d95ff"),
    "forest": ("#00543d", "#8fc26b"),
    "ochre": ("#a87400", "#d9a520"),
    "brick": ("#9c2f00", "#ff6b5e"),
    "slate": ("#7a828c", "#8b95a1"),
}
MARKERS = "osD^v<>phPX*d8H"
# What surrounds the data.
LABEL, TICK, EDGE, GRID, PAPER = "#24292f", "#57606a", "#818b98", "#e4e8ec", "#ffffff"
SURROUNDINGS = {
    "label": (LABEL, "#e6edf3"),
    "tick": (TICK, "#9aa5b1"),
    "edge": (EDGE, "#6b7683"),
    "grid": (GRID, "#262d35"),
    "paper": (PAPER, "#0f1317"),
}
# What matplotlib is told of every plot.
SETTINGS: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": LABEL,
    "axes.titlecolor": LABEL,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": EDGE,
    "ytick.color": EDGE,
    "xtick.labelcolor": TICK,
    "ytick.labelcolor": TICK,
    "text.color": LABEL,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    # Element ids are hashes: with a fixed salt, the same results give the same file.
    "svg.hashsalt": "fastweights",
}


@dataclass(frozen=True)
class Style:
    """How a model is drawn: its colour on light paper, its marker and its line."""

    colour: str
    marker: str
    dash: str = "-"


def _style(colour: str, marker: str, dash: str = "-") -> Style:
    return Style(COLOURS[colour][0], marker, dash)


# No two models of one figure share a colour or a marker, so that either tells them apart.
STYLES = {
    "softmax": _style("ink", "o"),
    "linear": _style("orange", "s"),
    "favor-64": _style("amber", "v", ":"),
    "favor-128": _style("ochre", "<", "--"),
    "favor-512": _style("brown", ">"),
    "dpfp-1": _style("sky", "^"),
    "dpfp-2": _style("blue", "D"),
    "dpfp-3": _style("navy", "P"),
    "dpfp-4": _style("navy", "P"),
    "dpfp-1-sum": _style("sky", "^"),
    "dpfp-1-delta": _style("blue", "h"),
    "dpfp-2-delta": _style("navy", "D"),
    "linear-delta": _style("orange", "s"),
    "favor-64-delta": _style("amber", "v", ":"),
    "favor-128-delta": _style("ochre", "<", "--"),
    "schlag2021": _style("pink", "X"),
    "schlag2021-dpfp": _style("plum", "P"),
    "transformer": _style("ink", "o"),
    "xl": _style("slate", "H"),
    "delta": _style("green", "D"),
    "delta-norm": _style("plum", "p"),
    "delta-nopos-norm": _style("pink", "X"),
    "delta-nopos": _style("navy", "d"),
    "delta-carried": _style("forest", "*"),
    "linear-carried": _style("brick", "<", ":"),
    "linear-carried-nonorm": _style("plum", "P"),
    "performer": _style("amber", "v", ":"),
    "performer-delta": _style("brown", ">", "--"),
    "performer-wide": _style("ochre", "<", ":"),
    "performer-wide-delta": _style("pink", "8", "--"),
    "performer-1": _style("amber", "v", ":"),
    "performer-4": _style("ochre", "<", "--"),
    "performer-8": _style("brown", ">"),
}


def style_of(model: str, number: int) -> Style:
    """Return the style of a model; that of one which has none follows from its number in the experiment."""
    return STYLES.get(model) or Style(list(COLOURS.values())[number % len(COLOURS)][0], MARKERS[number % len(MARKERS)])


def stylesheet(path: Path) -> str:
    """Return a style sheet with the colours as CSS variables, for light and for dark paper."""
    style = path.read_text(encoding="utf-8")
    for dark, place in enumerate(("/* light */", "/* dark */")):
        variables = (f"--plot-{name}: {pair[dark]};" for name, pair in (COLOURS | SURROUNDINGS).items())
        style = style.replace(place, " ".join(variables))
    return style


def with_variables(svg: str) -> str:
    """Return a drawing whose colours are CSS variables, so that they follow the page around it."""
    names = {pair[0]: name for name, pair in (COLOURS | SURROUNDINGS).items()}

    def variable(found: re.Match[str]) -> str:
        return f"var(--plot-{names[found[0]]})" if found[0] in names else found[0]

    return re.sub("#[0-9a-f]{6}", variable, svg)
