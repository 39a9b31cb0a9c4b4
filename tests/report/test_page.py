"""The page, from results that took no training."""

import re
from html.parser import HTMLParser

import pytest

from fastweights.common.formatting import format_number, format_seconds
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Results, Selection, Table
from fastweights.experiments.engine.store import Store
from fastweights.experiments.engine.sweep import sweep
from fastweights.report.build import build
from fastweights.report.chapter import Chapter
from fastweights.report.markup import fold
from fastweights.report.page import names
from fastweights.report.rows import result_rows, tally
from tests.experiments.fakes import Training
from tests.experiments.test_store import Silent


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_is_self_contained(built):
    text = built.path.read_text()
    reader = Reader()
    reader.feed(text)
    for _, attributes in reader.tags:
        for name in ("src", "href", "srcset", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not any(tag == "script" for tag, _ in reader.tags)
    plots = [attributes for _, attributes in reader.tags if attributes.get("role") == "img"]
    assert len(plots) == 6 and all(len(plot["aria-label"]) > 40 for plot in plots)
    assert built.chapters["fig2"].drawing.wide in text and built.chapters["fig2"].drawing.narrow in text
    assert "<title>fastweights results</title>" in text and 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert len(text) < 900_000


def test_the_page_says_how_and_what(built):
    text = built.path.read_text()
    for chapter in built.chapters.values():
        assert f'id="{chapter.experiment.name}"' in text
    assert "Not run yet: <code>fastweights reproduce fig4</code>" in text
    assert "<code>fastweights reproduce fig2 --scale small --seeds 1,2</code>" in text
    verdicts = [claim.holds for chapter in built.chapters.values() for claim in chapter.claims]
    assert text.count(" holds</span>") - text.count("1 holds</span>") == verdicts.count(True)
    record = built.chapters["fig2"].results.records[0]
    assert record.hardware in text and record.commit[:10] in text and f"torch {record.versions['torch']}" in text
    assert "d<sub>key</sub> 16 in place of 64" in text
    assert "ean and range over 2 seeds" in text


def test_the_index_is_by_number_with_a_picture_and_a_line(built):
    index = built.path.read_text().split('<ol class="index">')[1].split("</ol>")[0]
    entries = index.split("<li>")[1:]
    assert len(entries) == len(EXPERIMENTS)
    for entry, chapter in zip(entries, built.chapters.values(), strict=True):
        assert f'href="#{chapter.experiment.name}"' in entry and '<svg class="thumb"' in entry
        assert f'<span class="number">{chapter.number}</span> {chapter.experiment.title}' in entry
    assert "Small scale" in entries[1] and "Europarl, 2,000 updates" in entries[5]


def test_the_headline_says_what_was_run_how(built):
    header = built.path.read_text().split("</header>")[0]
    full, part, rest = re.split(r'<div class="card \w+">', header)[1:]
    assert "nothing yet" in full
    assert "<p>Figures 1 to 3, 5: small scale</p>" in part and "<p>Table 1: Europarl, 2,000 updates</p>" in part
    assert "Figure 4" in rest and "Tables 2 and 3, 5 and 6" in rest and "speed and memory" in rest
    claims = [claim for chapter in built.chapters.values() for claim in chapter.claims]
    assert f"Of {len(claims)} statements, {tally(claims)}" in header


def test_numbers_of_chapters_in_words():
    chapters = [Chapter(experiment, None, Results([]), [], None) for experiment in EXPERIMENTS.values()]
    by_name = {chapter.experiment.name: chapter for chapter in chapters}
    assert [chapter.number for chapter in chapters][:2] == ["Figure 1", "Figure 2"]
    assert by_name["speed"].number == "Sec. 6.3"
    assert names([by_name[name] for name in ("fig1", "fig2", "fig3", "table6")]) == "Figures 1 to 3 and Table 6"
    assert names([by_name["table1"]]) == "Table 1" and names([by_name["speed"]]) == EXPERIMENTS["speed"].title


def test_what_two_chapters_have_in_common_is_said_once(tmp_path, monkeypatch):
    Training(monkeypatch)
    store, note = Store(tmp_path), "Twenty steps of training: a check that everything runs, not a result."
    for name in ("fig2", "fig5"):
        sweep(EXPERIMENTS[name], EXPERIMENTS[name].cells("smoke"), store, Silent())
    text = build(store)[0].read_text()
    assert text.count(note) == 1 and 'As in <a href="#fig2">Figure 2</a>.' in text
    assert text.count("<td>a CPU") <= 1 and text.count('id="machines"') == 1


def test_the_command_names_what_was_chosen(tmp_path, monkeypatch):
    Training(monkeypatch)
    store, fig2 = Store(tmp_path), EXPERIMENTS["fig2"]
    sweep(fig2, fig2.cells("smoke", Selection(models=("linear", "dpfp-1"), sizes=(4,))), store, Silent())
    page, _ = build(store)
    assert "<code>fastweights reproduce fig2 --scale smoke --models linear,dpfp-1 --sizes 4</code>" in page.read_text()


def test_tables(built):
    fig2, fig3 = built.chapters["fig2"], built.chapters["fig3"]
    header, *rows = result_rows(fig2.experiment, fig2.results)
    assert header[0] == "S" and len(rows) == len(fig2.results.sizes())
    assert " ± " in rows[0][2]
    header, *rows = result_rows(fig3.experiment, fig3.results)
    assert header == ["model", "seed", "last loss", "best loss", "steps", "stopped", "seconds"]
    assert len(rows) == 8
    assert tally(built.chapters["fig1"].claims) == "4 hold"
    assert [format_seconds(s) for s in (1.25, 59, 61, 3700)] == ["1.2 s", "59 s", "1 min 01 s", "1 h 01 min"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(18_976.6, "18,977"), (252.1478, "252.1"), (0.0006739422, "0.0006739"), (2000, "2000"), (1_038_090, "1,038,090"),
     (0.0, "0"), (None, "NaN"), (float("nan"), "NaN"), ("target", "target"), (True, "True")],
)  # fmt: skip
def test_numbers_are_rounded_for_people(value, shown):
    assert format_number(value) == shown


def test_memory_and_speed_are_rounded_for_people(built):
    table1 = built.chapters["table1"]
    header, *rows = result_rows(table1.experiment, table1.results)
    shown = dict(zip(header, rows[0], strict=True))
    assert shown["memory"] == "500 MiB" and shown["tokens/s"] == "18,977" and shown["parameters"] == "60,487,680"


def test_what_every_row_repeats_is_said_once():
    rows = (("a", "64", "1.0", "2.0 (D = 1024)"), ("b", "64", "", "3.0 (D = 1024)"))
    table, said = fold(Table(("model", "d_dot", "ours", "paper"), rows))
    assert table == Table(("model", "ours", "paper (D = 1024)"), (("a", "1.0", "2.0"), ("b", "", "3.0")))
    assert said == "In every row: d_dot 64."
    alone = Table(("model", "D"), (("a", "64"),))
    assert fold(alone) == (alone, "")
    mixed = Table(("model", "paper"), (("a", "1 (D = 256)"), ("b", "2")))
    assert fold(mixed) == (mixed, "")
