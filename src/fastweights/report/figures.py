"""The figures, in the paper's form: one function for each kind of plot that an experiment can declare."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.experiments.engine.experiment import Experiment, Plot, Results
from fastweights.experiments.engine.retrieval import d_dot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PAPER = "#1b1f24", "#ffffff"
_SETTINGS: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6b7280",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "text.color": INK,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    # Element ids are hashes: with a fixed salt, the same results give the same file.
    "svg.hashsalt": "fastweights",
}


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str
    dash: str = "-"


# Okabe and Ito's hues, safe for the colour-blind: one for each family, darker for its larger members. Markers tell all
# of them apart without any colour.
STYLES = {
    "softmax": Style("#1b1f24", "o"),
    "linear": Style("#d55e00", "s"),
    "favor-64": Style("#f0b400", "v", ":"),
    "favor-128": Style("#c98a00", "<", "--"),
    "favor-512": Style("#8a5a00", ">", "-"),
    "dpfp-1": Style("#56b4e9", "^"),
    "dpfp-2": Style("#0072b2", "D"),
    "dpfp-3": Style("#003f70", "P"),
    "dpfp-4": Style("#003f70", "P"),
    "dpfp": Style("#0072b2", "D"),
    "dpfp-1-sum": Style("#56b4e9", "^"),
    "dpfp-1-delta": Style("#009e73", "o"),
    "dpfp-2-delta": Style("#00543d", "D"),
    "linear-delta": Style("#d55e00", "s"),
    "favor-64-delta": Style("#f0b400", "v", ":"),
    "favor-128-delta": Style("#c98a00", "<", "--"),
    "schlag2021": Style("#cc79a7", "X"),
    "schlag2021-dpfp": Style("#7e3f66", "P"),
    "transformer": Style("#1b1f24", "o"),
    "delta": Style("#009e73", "D"),
    "performer": Style("#f0b400", "v", ":"),
    "performer-delta": Style("#8a5a00", ">", "--"),
    "performer-1": Style("#f0b400", "v", ":"),
    "performer-4": Style("#c98a00", "<", "--"),
    "performer-8": Style("#8a5a00", ">", "-"),
    "performer-wide": Style("#f0b400", "v", ":"),
    "performer-wide-delta": Style("#8a5a00", ">", "--"),
    "delta-norm": Style("#7e3f66", "p"),
    "delta-nopos-norm": Style("#cc79a7", "X"),
    "delta-nopos": Style("#0072b2", "^"),
    "linear-carried": Style("#d55e00", "X", ":"),
    "linear-carried-nonorm": Style("#7e3f66", "P"),
    "delta-carried": Style("#009e73", "X", ":"),
    "xl": Style("#1b1f24", "o"),
}
_SURFACES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw(experiment: Experiment, results: Results) -> dict[str, bytes]:
    """Draw the figure as files: {"svg": ..., "png": ...}, the same bytes for the same results; none without a plot."""
    if experiment.plot is None:
        return {}
    with _canvas() as figure:
        kind = experiment.plot.kind
        (KINDS[kind] if isinstance(kind, str) else kind)(figure, experiment, results)
        return {kind: _save(figure, kind) for kind in ("svg", "png")}


@contextmanager
def _canvas() -> Iterator[Figure]:
    # A figure of its own, without pyplot: nothing global is changed and no window system is asked for.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure(figsize=(6.6, 4.5), layout="constrained")


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def scatter(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the loss over S, a symbol for each model; with several seeds, the mean and the whole range."""
    axes = _axes(figure, experiment)
    limits = []
    for model, style, label in _series(experiment, results):
        sizes = [size for size in results.sizes(model) if not math.isnan(results.mean(model, size))]
        means = [results.mean(model, size) for size in sizes]
        below = [mean - min(results.values(model, size)) for mean, size in zip(means, sizes, strict=True)]
        above = [max(results.values(model, size)) - mean for mean, size in zip(means, sizes, strict=True)]
        axes.errorbar(
            sizes,
            means,
            yerr=[below, above] if any(below + above) else None,
            fmt=style.marker,
            color=style.colour,
            markersize=6.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.3,
            elinewidth=1.2,
            capsize=2.5,
            label=label if sizes else f"{label}: NaN",
        )
        limit = d_dot(results.of(model)[0].config)
        if limit is not None and not model.startswith("favor"):
            limits.append((limit, style.colour))
    axes.set_xlim(left=0)
    if not _plot(experiment).log_y:
        _mark_limits(axes, [(x, colour) for x, colour in limits if x <= max(results.sizes(), default=0)])
        axes.set_ylim(bottom=min(-0.01, axes.get_ylim()[0]))
    _legend(figure)


def _mark_limits(axes: Axes, limits: list[tuple[int, str]]) -> None:
    for x, colour in limits:
        axes.axvline(x, color=colour, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        axes.annotate(
            f"$d_{{dot}}$ = {x}",
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="#4b5563",
        )


def curves(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the evaluation loss over training steps; with several seeds, mean and range while all of them run."""
    axes = _axes(figure, experiment)
    for model, style, label in _series(experiment, results):
        runs = [_curve(record.metrics["curve"]) for record in results.of(model)]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        for run in runs if len(runs) > 1 else []:
            axes.plot(list(run), list(run.values()), color=style.colour, linewidth=0.6, alpha=0.45)
        values = [[run[step] for run in runs] for step in steps]
        means = [sum(at) / len(at) for at in values]
        if len(runs) > 1:
            low, high = [min(at) for at in values], [max(at) for at in values]
            axes.fill_between(steps, low, high, color=style.colour, alpha=0.18, linewidth=0)
        name = label if steps else f"{label}: NaN"
        (line,) = axes.plot(steps, means, color=style.colour, linestyle=style.dash, linewidth=1.6, label=name)
        if steps:
            axes.plot(steps[-1], means[-1], style.marker, color=style.colour, markersize=7, markeredgewidth=0)
            line.set(marker=style.marker, markevery=(len(steps), 1))
    axes.set_xlim(left=0)
    _legend(figure)


def _curve(points: list[list[Any]]) -> dict[int, float]:
    return {step: loss for step, loss in points if loss is not None}


def perplexity(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the validation perplexity over training steps: see `learning`."""
    learning(figure, experiment, results, lambda loss: math.exp(min(loss, 700)))
    _plain_ticks(figure.axes[0])


def learning(
    figure: Figure, experiment: Experiment, results: Results, show: Callable[[float], float] = lambda value: value
) -> None:
    """Draw the score of validations over training steps, a line for each cell; larger sizes are thicker."""
    axes = _axes(figure, experiment)
    sizes = results.sizes()
    for model, style, label in _series(experiment, results):
        for record in results.of(model):
            size = record.config["size"]
            points = _curve(record.metrics["curve"])
            steps, values = list(points), [show(loss) for loss in points.values()]
            name = label if len(sizes) == 1 else f"{label}, {experiment.size_name} = {size}"
            axes.plot(
                steps,
                values,
                color=style.colour,
                linestyle=style.dash,
                linewidth=1.2 + 0.7 * sizes.index(size),
                marker=style.marker,
                markersize=4,
                label=name if record is results.of(model, size)[0] else None,
            )
    axes.set_xlim(left=0)
    _legend(figure)


def bars(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the words a second of each model, and the range from the slowest stretch to the fastest."""
    axes = _axes(figure, experiment)
    shown = [(label, style, results.of(model)[0].metrics) for model, style, label in _series(experiment, results)]
    shown.reverse()
    speeds = [metrics["words_per_s"] for _, _, metrics in shown]
    below = [metrics["words_per_s"] - metrics["slowest"] for _, _, metrics in shown]
    above = [metrics["fastest"] - metrics["words_per_s"] for _, _, metrics in shown]
    names, colours = [label for label, _, _ in shown], [style.colour for _, style, _ in shown]
    axes.barh(names, speeds, color=colours, height=0.7, xerr=[below, above], ecolor="#6b7280", capsize=2.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)


def _plain_ticks(axes: Axes) -> None:
    """Write ticks as numbers are read, 200 and not 2 x 10^2."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def surfaces(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the components of phi over the plane, each over the part of it where it is not zero."""
    metrics = results.records[0].metrics
    axis = np.array(metrics["axis"])
    axes: Any = figure.add_subplot(projection="3d")
    for number, (values, colour) in enumerate(zip(metrics["surfaces"], _SURFACES, strict=False)):
        z = np.array(values)
        rows, columns = (_support((z > 0).any(axis=across)) for across in (1, 0))
        x, y = np.meshgrid(axis[rows], axis[columns], indexing="ij")
        axes.plot_surface(
            x, y, z[np.ix_(rows, columns)], color=colour, alpha=0.9, edgecolor=PAPER, linewidth=0.25, shade=False,
            rcount=24, ccount=24,
        )  # fmt: skip
        peak = np.unravel_index(z.argmax(), z.shape)
        axes.text(axis[peak[0]], axis[peak[1]], z.max() + 0.09, f"$\\phi_{number + 1}$", color=colour, ha="center")
    axes.set(xlabel=_plot(experiment).x_label, ylabel=_plot(experiment).y_label, zlim=(0, 1.05))
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.set_zticks([0, 0.5, 1])
    axes.view_init(elev=28, azim=-58)


def _support(present: Any) -> Any:
    """Return the indices of the part that is present and one more on each side, where the surface reaches zero."""
    return np.flatnonzero(np.convolve(present, [1, 1, 1], "same"))


KINDS: dict[str, Callable[[Figure, Experiment, Results], None]] = {
    "scatter": scatter,
    "curves": curves,
    "surfaces": surfaces,
    "perplexity": perplexity,
    "learning": learning,
    "bars": bars,
}


def _axes(figure: Figure, experiment: Experiment) -> Axes:
    axes, plot = figure.add_subplot(), _plot(experiment)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_axisbelow(True)
    if plot.log_y:
        axes.set_yscale("log")
    if plot.y_range:
        axes.set_ylim(*plot.y_range)
    return axes


def _plot(experiment: Experiment) -> Plot:
    """Return the plot of an experiment that is being drawn."""
    assert experiment.plot is not None
    return experiment.plot


def _legend(figure: Figure) -> None:
    _, labels = figure.axes[0].get_legend_handles_labels()
    columns = 4 if max(map(len, labels), default=0) < 20 else 2
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9, handletextpad=0.5)


def _series(experiment: Experiment, results: Results) -> Iterator[tuple[str, Style, str]]:
    for number, (model, label) in enumerate(experiment.models.items()):
        if results.of(model):
            yield model, STYLES.get(model, list(STYLES.values())[number % len(STYLES)]), _subscripts(label)


def _subscripts(text: str) -> str:
    """Write d_dot and d_key as the paper does."""
    return re.sub(r"\bd_(dot|key)\b", r"$d_{\1}$", text)
