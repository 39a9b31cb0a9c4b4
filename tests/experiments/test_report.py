"""Plots and page, from results that took no training."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Results, Selection
from fastweights.experiments.engine.store import Store
from fastweights.experiments.engine.sweep import sweep
from fastweights.report.build import build
from fastweights.report.figures import STYLES, draw
from fastweights.report.rows import format_seconds, losses, tally
from tests.experiments.fakes import Training, record
from tests.experiments.test_store import Silent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("out"))
    with pytest.MonkeyPatch.context() as patch:
        Training(patch)
        for name in ("fig1", "fig2", "fig3", "fig5"):
            experiment = EXPERIMENTS[name]
            sweep(experiment, experiment.cells("small", Selection(seeds=(1, 2))), store, Silent())
        path, chapters = build(store)
    return store, path, {chapter.experiment.name: chapter for chapter in chapters}


def test_plots_are_written(built):
    store, _, chapters = built
    for name in ("fig1", "fig2", "fig3", "fig5"):
        assert (store.folder(name) / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (store.folder(name) / f"{name}.svg").read_bytes()
        assert svg == chapters[name].svg and b"</svg>" in svg and len(svg) < 300_000
    assert not store.folder("fig4").exists()


def test_the_same_results_give_the_same_plot(built):
    _, _, chapters = built
    for chapter in (chapters["fig1"], chapters["fig3"]):
        assert draw(chapter.experiment, chapter.results)["svg"] == chapter.svg


@pytest.mark.parametrize("name", ["fig2", "fig3"])
def test_several_seeds_show_their_spread(name):
    def svg(*seeds):
        records = [record("dpfp-1-delta" if name == "fig3" else "linear", 20, 0.1 * seed, seed=seed) for seed in seeds]
        return draw(EXPERIMENTS[name], Results(records))["svg"]

    spread = b"LineCollection" if name == "fig2" else b"FillBetweenPolyCollection"
    assert spread not in svg(1)
    assert spread in svg(1, 2)


def test_plots_of_nothing_but_nan():
    for name, model in (("fig5", "favor-64-delta"), ("fig2", "favor-64")):
        assert draw(EXPERIMENTS[name], Results([record(model, 20, float("nan"))]))["png"]
    alone = record("dpfp-1-delta", 20, 0.1)
    alone.metrics["curve"] = [[100, None]]
    assert draw(EXPERIMENTS["fig3"], Results([alone]))["png"]


def test_every_model_has_a_style_of_its_own():
    for name in ("fig2", "fig5"):
        styles = [STYLES[model] for model in EXPERIMENTS[name].models]
        assert len({style.marker for style in styles}) == len({style.colour for style in styles}) == len(styles)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_is_self_contained(built):
    _, path, chapters = built
    text = path.read_text()
    reader = Reader()
    reader.feed(text)
    for _, attributes in reader.tags:
        for name in ("src", "href", "srcset", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert not any(tag == "script" for tag, _ in reader.tags)
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 4 and all(len(image["alt"]) > 40 for image in images)
    assert base64.b64decode(images[1]["src"].split(",")[1]) == chapters["fig2"].svg
    assert "<title>fastweights results</title>" in text and 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_says_how_and_what(built):
    _, path, chapters = built
    text = path.read_text()
    for chapter in chapters.values():
        assert f'id="{chapter.experiment.name}"' in text
    assert "Not run yet: <code>fastweights reproduce fig4</code>" in text
    assert "<code>fastweights reproduce fig2 --scale small --seeds 1,2</code>" in text
    assert text.count("holds</span>") == sum(c.holds is True for chapter in chapters.values() for c in chapter.claims)
    record = chapters["fig2"].results.records[0]
    assert record.hardware in text and record.commit in text and f"torch {record.versions['torch']}" in text
    assert "d<sub>key</sub> 16 in place of 64" in text
    assert "mean and range over 2 seeds" in text


def test_the_command_names_what_was_chosen(tmp_path, monkeypatch):
    Training(monkeypatch)
    store, fig2 = Store(tmp_path), EXPERIMENTS["fig2"]
    sweep(fig2, fig2.cells("smoke", Selection(models=("linear", "dpfp-1"), sizes=(4,))), store, Silent())
    page, _ = build(store)
    assert "<code>fastweights reproduce fig2 --scale smoke --models linear,dpfp-1 --sizes 4</code>" in page.read_text()


def test_tables(built):
    _, _, chapters = built
    header, *rows = losses(chapters["fig2"].experiment, chapters["fig2"].results)
    assert header[0] == "S" and len(rows) == len(chapters["fig2"].results.sizes())
    assert " ± " in rows[0][2]
    header, *rows = losses(chapters["fig3"].experiment, chapters["fig3"].results)
    assert header == ["model", "seed", "last loss", "best loss", "steps", "stopped", "seconds"]
    assert len(rows) == 8
    assert tally(chapters["fig1"].claims) == "4 hold"
    assert [format_seconds(s) for s in (1.25, 59, 61, 3700)] == ["1.2 s", "59 s", "1 min 01 s", "1 h 01 min"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_the_page_in_a_browser(built, tmp_path):
    _, path, _ = built
    # The page has no script of its own; this one counts the images that were decoded.
    probe = """<script>addEventListener("load", () => { document.title = "shown " +
        [...document.images].filter(image => image.complete && image.naturalWidth > 100).length +
        " wide " + (document.documentElement.scrollWidth <= innerWidth) })</script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(path.read_text().replace("</body>", probe))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--window-size=500,900", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=60)
    assert re.search("<title>(.*?)</title>", done.stdout)[1] == "shown 4 wide true"
    assert "CONSOLE" not in done.stderr
