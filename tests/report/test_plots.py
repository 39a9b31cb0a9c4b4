"""Plots: as files, and as drawings inside the page."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Plot, Results
from fastweights.report.drawing import draw, draw_files
from fastweights.report.figures import log_ticks
from fastweights.report.style import COLOURS, SURROUNDINGS, style_of
from tests.experiments.fakes import record
from tests.report.conftest import FIGURES


def labels(svg):
    """Return what is written in a drawing."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_plots_are_written(built):
    for name in FIGURES:
        assert (built.store.folder(name) / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (built.store.folder(name) / f"{name}.svg").read_bytes()
        assert b"</svg>" in svg and len(svg) < 300_000
    assert not built.store.folder("fig4").exists()


def test_the_same_results_give_the_same_plot(built):
    for name in ("fig1", "fig3"):
        chapter = built.chapters[name]
        assert draw(chapter.experiment, chapter.results, name) == chapter.drawing
        svg = (built.store.folder(name) / f"{name}.svg").read_bytes()
        assert draw_files(chapter.experiment, chapter.results)["svg"] == svg


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_several_seeds_show_their_spread(name):
    def svg(*seeds):
        records = [record("dpfp-1-delta" if name == "fig3" else "linear", 20, 0.1 * seed, seed=seed) for seed in seeds]
        return draw_files(EXPERIMENTS[name], Results(records))["svg"]

    spread = b"LineCollection" if name == "fig2" else b"FillBetweenPolyCollection"
    assert spread not in svg(1)
    assert spread in svg(1, 2)


def test_plots_of_nothing_but_nan():
    for name, model in (("fig5", "favor-64-delta"), ("fig2", "favor-64")):
        alone = Results([record(model, 20, float("nan"))])
        assert draw_files(EXPERIMENTS[name], alone)["png"]
        assert draw(EXPERIMENTS[name], alone, name).legend[0][1].endswith("(not a number)")
    alone = record("dpfp-1-delta", 20, 0.1)
    alone.metrics["curve"] = [[100, None]]
    assert draw_files(EXPERIMENTS["fig3"], Results([alone]))["png"]


def test_a_plot_of_your_own_has_a_legend_of_whatever_it_draws():
    def kind(figure, experiment, results):
        axes = figure.add_subplot()
        axes.scatter([1, 2], [1, 2], color="#d55e00", label="points")
        axes.bar([1], [1], color="C0", label="bars")
        axes.plot([1, 2], color="tab:green", label="line")

    experiment = replace(EXPERIMENTS["fig2"], plot=Plot(kind=kind))
    drawing = draw(experiment, Results([record("linear", 20, 0.1)]), "own")
    swatches = {label: swatch for swatch, label in drawing.legend}
    assert swatches.keys() == {"points", "bars", "line"}
    assert "var(--plot-orange)" in swatches["points"] and "#1f77b4" in swatches["bars"]
    assert "#2ca02c" in swatches["line"] and "polygon" not in swatches["line"]


@pytest.mark.parametrize("name", [name for name, e in EXPERIMENTS.items() if e.plot and e.plot.kind != "bars"])
def test_models_of_one_plot_share_neither_colour_nor_marker(name):
    styles = [style_of(model, number) for number, model in enumerate(EXPERIMENTS[name].models)]
    assert len({style.marker for style in styles}) == len({style.colour for style in styles}) == len(styles)


@given(st.floats(-6, 4), st.floats(0.02, 8))
def test_a_logarithmic_axis_has_three_to_eight_labels(start, decades):
    low, high = 10**start, 10 ** (start + decades)
    ticks = log_ticks(low, high)
    assert 3 <= len(ticks) <= 8 and ticks == sorted(set(ticks)) and low <= ticks[0] and ticks[-1] <= high


def test_labels_of_axes_are_numbers_as_they_are_read(built):
    drawing = built.chapters["fig3"].drawing
    for svg in (drawing.wide, drawing.narrow):
        assert {"0.001", "0.01", "0.1", "1", "10", "100", "1,000", "training steps"} <= set(labels(svg))


def test_a_line_far_above_the_others_leaves_them_the_axis(built):
    drawing = built.chapters["table4"].drawing
    far = [label for _, label in drawing.legend if "above the axis" in label]
    assert far == ["Linear Transformer (best 8,103, above the axis)"], "exp(9), the lowest of its line"
    ticks = [float(label.replace(",", "")) for label in labels(drawing.narrow) if re.fullmatch(r"[\d,.]+", label)]
    perplexities = [tick for tick in ticks if 1 < tick < 800]
    assert len(perplexities) >= 3 and max(perplexities) < 300, "the others begin at exp(5.3) = 200"


def test_drawings_take_their_colours_from_the_page(built):
    for chapter in built.chapters.values():
        if chapter.drawing is None:
            continue
        for svg in (chapter.drawing.wide, chapter.drawing.narrow, *(swatch for swatch, _ in chapter.drawing.legend)):
            used = set(re.findall(r"var\(--plot-(\w+)\)", svg))
            assert used and used <= (COLOURS | SURROUNDINGS).keys() and not re.search("#[0-9a-f]{6}", svg)


def test_elements_of_all_drawings_have_names_of_their_own(built):
    text = built.path.read_text()
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names)) > 100
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(names)
