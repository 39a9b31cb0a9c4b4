"""The figures, in the paper's form: one function for each kind of plot that an experiment can declare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.experiments.engine.experiment import Experiment, Plot, Results
from fastweights.experiments.engine.perplexity import differences
from fastweights.experiments.engine.retrieval import d_dot
from fastweights.report.style import COLOURS, EDGE, LABEL, PAPER, TICK, Style, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAR = 3.0
"""A logarithmic axis leaves out a series if its best value is more than this many times the usual best value."""

_SURFACES = [COLOURS[name][0] for name in ("blue", "orange", "green", "pink")]


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
            markersize=6.5 if _is_wide(figure) else 4.5,
            markeredgecolor=PAPER,
            markeredgewidth=0.3,
            elinewidth=1.2,
            capsize=2.5,
            label=_named(label, sizes),
        )
        limit = d_dot(results.of(model)[0].config)
        if limit is not None and not model.startswith("favor"):
            limits.append((limit, style.colour))
    axes.set_xlim(left=0)
    if not _plot(experiment).log_y:
        _mark_limits(axes, [(x, colour) for x, colour in limits if x <= max(results.sizes(), default=0)])
        low, high = axes.get_ylim()
        axes.set_ylim(min(-0.01, low), high + 0.06 * (high - low))
    _number_axes(axes)


def _mark_limits(axes: Axes, limits: list[tuple[int, str]]) -> None:
    for x, colour in limits:
        axes.axvline(x, color=colour, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(str(x), (x, 1), **where, xytext=(2.5, -1), va="top", color=TICK)


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
        name = _named(label, steps)
        (line,) = axes.plot(steps, means, color=style.colour, linestyle=style.dash, linewidth=1.6, label=name)
        if steps:
            axes.plot(steps[-1], means[-1], style.marker, color=style.colour, markersize=7, markeredgewidth=0)
            line.set(marker=style.marker, markevery=(len(steps), 1))
    axes.set_xlim(left=0)
    _number_axes(axes)


def _curve(points: list[list[Any]]) -> dict[int, float]:
    return {step: loss for step, loss in points if loss is not None}


def perplexity(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the validation perplexity over training steps, see `learning`, and below it how two models compare."""
    pair = _plot(experiment).compared
    points = differences(results, *pair) if pair else {}
    grid: Any = figure.add_gridspec(2, 1, height_ratios=(3, 1)) if points else None
    learning(figure, experiment, results, lambda loss: math.exp(min(loss, 700)), grid[0] if grid else 111)
    if pair and grid:
        axes = figure.add_subplot(grid[1])
        axes.axhline(0, color=EDGE, linewidth=1)
        axes.plot(list(points), list(points.values()), color=LABEL, marker="o", markersize=4)
        axes.set_title("loss: " + " minus ".join(experiment.models[model] for model in pair))
        axes.set_xlim(left=0)
        _number_axes(axes)


def learning(
    figure: Figure,
    experiment: Experiment,
    results: Results,
    show: Callable[[float], float] = lambda value: value,
    place: Any = 111,
) -> None:
    """Draw the score of validations over training steps, a line for each cell; larger sizes are thicker."""
    axes = _axes(figure, experiment, place)
    sizes = results.sizes()
    for model, style, label in _series(experiment, results):
        for record in results.of(model):
            size = record.config["size"]
            points = _curve(record.metrics["curve"])
            name = _named(label if len(sizes) == 1 else f"{label}, {experiment.size_name} = {size}", points)
            axes.plot(
                list(points),
                [show(loss) for loss in points.values()],
                color=style.colour,
                linestyle=style.dash,
                linewidth=1.2 + 0.7 * sizes.index(size),
                marker=style.marker,
                markersize=5,
                markeredgewidth=0,
                label=name if record is results.of(model, size)[0] else None,
            )
    axes.set_xlim(left=0)
    if axes.get_yscale() == "log":
        _leave_out_the_far(axes)
    _number_axes(axes)


def _leave_out_the_far(axes: Axes) -> None:
    """End the axis above the usual lines; mark lines beyond it at its edge, and give their best value in the legend."""
    points = {line: np.asarray(line.get_ydata(), dtype=float) for line in axes.lines}
    values = {line: y for line, y in points.items() if y.size}
    usual = statistics.median_low([float(y.min()) for y in values.values()]) if values else math.inf
    top = 1.25 * max((float(y.max()) for y in values.values() if y.min() <= FAR * usual), default=math.inf)
    far = {line: y for line, y in values.items() if y.min() > top}
    if not far:
        return
    axes.set_ylim(top=top)
    for number, (line, y) in enumerate(far.items()):
        line.set_label(f"{line.get_label()} (best {y.min():,.0f}, above the axis)")
        place: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": line.get_color()}
        axes.plot(0.98 - 0.06 * number, 1, marker=line.get_marker(), markersize=7, markeredgewidth=0, **place)


def bars(figure: Figure, experiment: Experiment, results: Results) -> None:
    """Draw the words a second of each model, and the range from the slowest stretch to the fastest."""
    axes = _axes(figure, experiment)
    shown = [(label, style, results.of(model)[0].metrics) for model, style, label in _series(experiment, results)]
    shown.reverse()
    speeds = [metrics["words_per_s"] for _, _, metrics in shown]
    below = [metrics["words_per_s"] - metrics["slowest"] for _, _, metrics in shown]
    above = [metrics["fastest"] - metrics["words_per_s"] for _, _, metrics in shown]
    names, colours = [label for label, _, _ in shown], [style.colour for _, style, _ in shown]
    axes.barh(names, speeds, color=colours, height=0.7, xerr=[below, above], ecolor=EDGE, capsize=2.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    _number_axes(axes)


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
            rcount=12, ccount=12,
        )  # fmt: skip
        peak = np.unravel_index(z.argmax(), z.shape)
        label = "φ" + "₁₂₃₄"[number]
        axes.text(axis[peak[0]], axis[peak[1]], z.max() + 0.09, label, color=colour, ha="center")
    axes.set(xlabel=_plot(experiment).x_label, ylabel=_plot(experiment).y_label, zlim=(0, 1.05))
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.set_zticks([0, 0.5, 1])
    for side in (axes.xaxis, axes.yaxis, axes.zaxis):
        side.set_pane_color(PAPER)
    axes.view_init(elev=28, azim=-58)


def _support(present: Any) -> Any:
    """Return the indices that are present and one more on each side, where the surface reaches zero."""
    return np.flatnonzero(np.convolve(present, [1, 1, 1], "same"))


KINDS: dict[str, Callable[[Figure, Experiment, Results], None]] = {
    "scatter": scatter,
    "curves": curves,
    "surfaces": surfaces,
    "perplexity": perplexity,
    "learning": learning,
    "bars": bars,
}


def _axes(figure: Figure, experiment: Experiment, place: Any = 111) -> Axes:
    axes, plot = figure.add_subplot(place), _plot(experiment)
    # The name of the vertical axis stands above it, where it takes no width and needs no turned head.
    axes.set(xlabel=plot.x_label, title=plot.y_label)
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


def _is_wide(figure: Any) -> bool:
    return bool(figure.get_figwidth() > 5)


def _named(label: str, points: Collection[Any]) -> str:
    return label if points else f"{label} (not a number)"


def _number_axes(axes: Axes) -> None:
    """Write ticks as 2,000 and not as 2 x 10^3, with at least three of them on a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(8 if _is_wide(axes.figure) else 4, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float) -> list[float]:
    """Return the roundest numbers from `low` to `high`, three to eight of them."""
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for numbers in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [tick for decade in decades for tick in (n * 10.0**decade for n in numbers) if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 8)]
    return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= tick <= high]


def _series(experiment: Experiment, results: Results) -> Iterator[tuple[str, Style, str]]:
    for number, (model, label) in enumerate(experiment.models.items()):
        if results.of(model):
            yield model, style_of(model, number), label
