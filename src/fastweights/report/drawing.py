"""A plot as files, and as drawings inside the page: a wide one, a narrow one for phones, and a legend in words."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.experiments.engine.experiment import Experiment, Results
from fastweights.report.figures import KINDS
from fastweights.report.style import SETTINGS, with_variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches; the page shows them about 1.4 times as large, so that the text is 13 to 14 pixels high.
_FILE, _WIDE, _NARROW = (6.6, 4.5), (6.8, 3.9), (3.7, 3.3)


@dataclass(frozen=True)
class Drawing:
    """A plot inside the page, in two shapes.

    Args:
        key: names the elements of the drawing, unique on the page.
        wide, narrow: SVG elements.
        view: the part of `narrow` that holds the data, as a `viewBox`.
        legend: a swatch, as an SVG element, and the label of each series.
    """

    key: str
    wide: str
    narrow: str
    view: str
    legend: tuple[tuple[str, str], ...]


def draw(experiment: Experiment, results: Results, key: str) -> Drawing | None:
    """Draw the plot for the page; None where an experiment has none."""
    if experiment.plot is None:
        return None
    with _drawn(experiment, results, _WIDE, text_as_text=True) as figure:
        wide = _element(_save(figure, "svg"), f"{key}-wide")
        legend = tuple((_swatch(handle), str(handle.get_label())) for handle in _handles(figure))
    with _drawn(experiment, results, _NARROW, text_as_text=True) as figure:
        narrow = _element(_save(figure, "svg"), f"{key}-narrow")
        view = _view(figure)
    return Drawing(key, wide, narrow, view, legend)


def draw_files(experiment: Experiment, results: Results) -> dict[str, bytes]:
    """Draw the plot as files: {"svg": ..., "png": ...}, the same bytes for the same results; none without a plot."""
    if experiment.plot is None:
        return {}
    with _drawn(experiment, results, _FILE) as figure:
        handles = _handles(figure)
        if handles:
            labels = [re.sub(r"\bd_(dot|key)\b", r"$d_{\1}$", str(handle.get_label())) for handle in handles]
            columns = 4 if max(map(len, labels)) < 20 else 2
            about: dict[str, Any] = {"ncols": columns, "fontsize": 9, "handletextpad": 0.5}
            figure.legend(handles, labels, loc="outside lower center", **about)
        return {kind: _save(figure, kind) for kind in ("svg", "png")}


@contextmanager
def _drawn(
    experiment: Experiment, results: Results, size: tuple[float, float], text_as_text: bool = False
) -> Iterator[Figure]:
    # A figure of its own, without pyplot: nothing global is changed and no window system is asked for.
    import matplotlib
    from matplotlib.figure import Figure

    assert experiment.plot is not None
    kind = experiment.plot.kind
    fonts: dict[Any, Any] = {"svg.fonttype": "none" if text_as_text else "path", "font.size": 10 if size[0] > 5 else 9}
    with matplotlib.rc_context({**SETTINGS, **fonts}):
        figure = Figure(figsize=size, layout="constrained")
        (KINDS[kind] if isinstance(kind, str) else kind)(figure, experiment, results)
        yield figure


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _handles(figure: Figure) -> list[Any]:
    """Return what a legend names; nothing where the plot has drawn one itself."""
    if figure.legends or not figure.axes or any(axes.get_legend() for axes in figure.axes):
        return []
    return list(figure.axes[0].get_legend_handles_labels()[0])


def _view(figure: Figure) -> str:
    """Return the place of the first axes, in points from the upper left corner."""
    width, height = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    if not figure.axes:
        return f"0 0 {width:g} {height:g}"
    box = figure.axes[0].get_position()
    return f"{box.x0 * width:.1f} {(1 - box.y1) * height:.1f} {box.width * width:.1f} {box.height * height:.1f}"


def _swatch(handle: Any) -> str:
    """Draw the line and the marker of a series, as they stand in front of its label; a square for any other kind."""
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.markers import MarkerStyle

    first = handle[0] if isinstance(handle, BarContainer | ErrorbarContainer) else handle
    line = first if isinstance(first, Line2D) else Line2D([], [], marker="s", linestyle="none")
    colour = to_hex(line.get_color() if line is first else np.atleast_2d(first.get_facecolor())[0])
    marker = MarkerStyle(line.get_marker())
    polygons: Any = marker.get_path().transformed(marker.get_transform()).to_polygons()
    outlines = [" ".join(f"{14 + 9 * x:.1f},{7 - 9 * y:.1f}" for x, y in polygon) for polygon in polygons]
    marks = "".join(f'<polygon points="{points}" style="fill: {colour}"/>' for points in outlines)
    dash = {"-": "none", "--": "5 3", ":": "1.5 2.5"}.get(str(line.get_linestyle()))
    stroke = f'<path d="M1 7H27" style="stroke: {colour}; stroke-width: 2; stroke-dasharray: {dash}"/>' if dash else ""
    return with_variables(f'<svg class="swatch" viewBox="0 0 28 14" aria-hidden="true">{stroke}{marks}</svg>')


def _element(svg: bytes, key: str) -> str:
    """Return the drawing as an element of a page: no metadata, ids of its own, colours that are variables."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"| xmlns(:xlink)?="[^"]*"| version="1.1"', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text).replace("xlink:href", "href")
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    used = set(re.findall(r"#([\w.-]+)[\")]", text)) | {"figure_1"}
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{key}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'href="#|url\(#', lambda found: f"{found[0]}{key}-", text)
    # Numbers of attributes only: those between the tags are read.
    text = re.sub(r'="[^"]*"', lambda found: re.sub(r"\d+\.\d{3,}", _hundredths, found[0]), text)
    # Lines of data, wider than those of axes and grid, are bolder where `--bold` says so: in a thumbnail.
    text = re.sub(r"stroke-width: (1\.[2-9]\d*|[2-9][\d.]*)", r"stroke-width: calc(\1px * var(--bold, 1))", text)
    text = re.sub(r"\s+", " ", text).replace("> <", "><")
    return with_variables(text)


def _hundredths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
