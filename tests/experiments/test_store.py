"""Results on disk: whole or absent, never trained twice, never overwritten by mistake."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.common import provenance
from fastweights.common.files import write_atomically
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import BadInput, Cell, CellOutcome, Selection
from fastweights.experiments.engine.store import FORMAT, Store, assembly
from fastweights.experiments.engine.sweep import sweep
from tests.experiments.fakes import Training, record

FIG2, FIG3, FIG4, FIG5 = (EXPERIMENTS[name] for name in ("fig2", "fig3", "fig4", "fig5"))


class Silent:
    def begin(self, experiment, known, missing):
        assert {cell.slug for cell in known}.isdisjoint(cell.slug for cell in missing)

    def step(self, cell, step, loss):
        assert isinstance(cell, Cell)

    def done(self, record):
        pass


@pytest.fixture
def training(monkeypatch):
    return Training(monkeypatch)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "out")
    store.warnings = []
    store.warn = store.warnings.append
    return store


def go(experiment, store, selection=None, scale="smoke", **options):
    sweep(experiment, experiment.cells(scale, selection), store, Silent(), **options)


def results_of(store, name):
    return json.loads((store.folder(name) / "results.json").read_text())


def test_results_have_the_documented_form(store, training):
    go(FIG2, store)
    content = results_of(store, "fig2")
    assert list(content) == ["format", "experiment", "scale", "commit", "hardware", "versions", "cells"]
    assert (content["format"], content["experiment"], content["scale"]) == (FORMAT, "fig2", "smoke")
    assert content["versions"]["torch"] and content["hardware"] and content["commit"] == provenance.commit()
    assert len(content["cells"]) == len(FIG2.grid("smoke")) == len(training.trained)
    for cell in content["cells"]:
        assert {"model", "rule", "size", "seed"} <= set(cell["config"])
        assert {"last_loss", "best_loss", "steps", "curve"} <= set(cell["metrics"])
        assert {"paper", "wall_s", "commit", "hardware", "versions"} <= set(cell)
        assert all(len(point) == 2 for point in cell["metrics"]["curve"])
    assert {cell["paper"]["capacity"] for cell in content["cells"] if cell["paper"]} == {64, 128, 256, 384}


def test_not_a_number_is_stored_as_null(store, training):
    assert CellOutcome({"a": math.nan, "b": [[1, math.inf], (2, 0.1)]}, 1.0).metrics == {
        "a": None,
        "b": [[1, None], [2, 0.1]],
    }
    go(FIG5, store, Selection(("favor-64-delta",), (4,)))
    (cell,) = results_of(store, "fig5")["cells"]
    assert cell["metrics"]["last_loss"] is None


def test_an_interrupted_sweep_goes_on(store, training):
    training.stop_after = 5
    with pytest.raises(KeyboardInterrupt):
        go(FIG2, store)
    assert len(results_of(store, "fig2")["cells"]) == 5
    done, training.stop_after = list(training.trained), None
    go(FIG2, store)
    assert training.trained[:5] == done
    assert len(set(training.trained)) == len(training.trained) == 16


def test_nothing_is_written_when_nothing_changed(store, training):
    go(FIG2, store)
    before = {path: path.stat().st_mtime_ns for path in store.out.rglob("*.json")}
    go(FIG2, store)
    assert before == {path: path.stat().st_mtime_ns for path in store.out.rglob("*.json")}


@pytest.mark.parametrize("name", ["fig2", "fig5"])
def test_one_model_and_size_do_not_hide_the_others(store, training, name):
    experiment = EXPERIMENTS[name]
    for size in (4, 6):
        go(experiment, store, Selection(None, (size,)))
    assert {cell["config"]["size"] for cell in results_of(store, name)["cells"]} == {4, 6}


@pytest.mark.parametrize(("first", "second"), [(FIG2, FIG4), (FIG4, FIG2), (FIG3, FIG5), (FIG5, FIG3)])
def test_figures_share_equal_cells(store, training, first, second):
    go(first, store)
    go(second, store)
    assert len(set(training.trained)) == len(training.trained) == 16
    for experiment in (first, second):
        assert len(results_of(store, experiment.name)["cells"]) == len(experiment.grid("smoke"))


def test_force_trains_again_and_sisters_follow(store, training):
    finished = set()
    for experiment in (FIG2, FIG4):
        go(experiment, store)
    for experiment in (FIG4, FIG2):
        go(experiment, store, force=True, finished=finished)
    assert len(training.trained) == 32, "16 at first, 8 + 8 by force: what one figure forced, the other takes"
    small = Selection(("dpfp-1",))
    loss = record("dpfp-1", 8, 0.25)
    cell = FIG4.cells("smoke", small)[0]
    object.__setattr__(loss, "config", cell.config)
    store.save("fig4", loss)
    assert store.known("fig2")[cell.slug].metrics["last_loss"] == 0.25


def test_scales_live_side_by_side(store, training):
    small = Selection(("linear",), (20,))
    go(FIG2, store, small, "paper")
    go(FIG2, store, small, "small")
    assert results_of(store, "fig2")["scale"] == "small"
    # A results file that came alone still knows its cells, and gives way without losing them.
    for path in (store.folder("fig2") / "cells").iterdir():
        path.unlink()
    go(FIG2, store, Selection(("linear",), (4,)), "smoke")
    go(FIG2, store, small, "small")
    assert len(training.trained) == 3
    assert [cell["config"]["scale"] for cell in results_of(store, "fig2")["cells"]] == ["small"]


def test_cells_of_an_older_configuration_are_left_out(store, training):
    old = record("linear", 4, 0.1, scale="smoke")
    store.save("fig2", old)
    go(FIG2, store)
    assert old.slug not in {store_record.slug for store_record in store.of(FIG2, "smoke")}
    assert len(results_of(store, "fig2")["cells"]) == 16


def test_results_of_an_older_configuration_are_still_shown(store, training):
    path = store.folder("fig2") / "results.json"
    old = record("linear", 4, 0.1, scale="smoke")
    write_atomically(path, assembly(FIG2, "smoke", [old]).encode())
    assert store.current(FIG2) == ("smoke", [old])
    assert "older configuration" in store.warnings[0]
    go(FIG2, store)
    assert old.slug not in {found.slug for found in store.current(FIG2)[1]}
    assert store.known("fig2")[old.slug] == old


@pytest.mark.parametrize("damage", ["", "{", '{"format": 1}', '{"format": 1, "config": 3, "metrics": {}}', "[]"])
def test_a_broken_cell_is_reported_and_trained_again(store, training, damage):
    go(FIG2, store)
    cell = FIG2.cells("smoke")[3]
    path = store.folder("fig2") / "cells" / f"{cell.slug}.json"
    path.write_text(damage)
    (store.folder("fig2") / "results.json").unlink()
    go(FIG2, store)
    assert len(training.trained) == 17
    assert len(store.warnings) == 1 and str(path) in store.warnings[0]
    assert json.loads(path.read_text())["config"] == cell.config


def test_a_cell_under_the_wrong_name_is_not_believed(store, training):
    go(FIG2, store)
    cells = store.folder("fig2") / "cells"
    first, second = sorted(cells.iterdir())[:2]
    second.write_text(first.read_text())
    store.known("fig2")
    assert "does not match" in store.warnings[0]


def test_killed_in_the_middle_of_a_write(store, training):
    cell = FIG2.cells("smoke")[0]
    path = store.folder("fig2") / "cells" / f"{cell.slug}.json"
    script = (
        "import os, sys; from pathlib import Path; from fastweights.common.files import write_atomically\n"
        "os.fsync = lambda file: os._exit(9)\n"
        "write_atomically(Path(sys.argv[1]), b'half')"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)]).returncode == 9
    (left_over,) = path.parent.iterdir()
    assert left_over.suffix == ".tmp" and not path.exists()
    go(FIG2, store)
    assert len(training.trained) == 16
    assert store.warnings == [] and not left_over.exists() and path.exists()


def test_a_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', "has format 99"),
        ('{"format": 1, "experiment": "fig2", "cells": [', "cut short"),
        ("", "cut short"),
        ('{"experiment": "fig2"}', "no 'format'"),
        ('{"format": 1, "experiment": "fig9", "scale": "smoke", "cells": []}', "holds 'fig9'"),
        ('{"format": 1, "experiment": "fig2", "scale": "smoke", "cells": [{}]}', "no 'config'"),
    ],
)
def test_results_that_cannot_be_read_are_not_touched(store, training, content, message):
    path = store.folder("fig2") / "results.json"
    write_atomically(path, content.encode())
    with pytest.raises(BadInput, match=message):
        go(FIG2, store)
    assert training.trained == [] and path.read_text() == content


def test_a_cell_of_another_version_is_not_touched(store, training):
    go(FIG2, store)
    path = next((store.folder("fig2") / "cells").iterdir())
    path.write_text('{"format": 99}')
    with pytest.raises(BadInput, match="format 99"):
        go(FIG2, store)
    assert path.read_text() == '{"format": 99}'


def test_slugs_tell_configurations_apart():
    config = {"scale": "paper", "model": "linear", "size": 20, "seed": 1, "d_key": 64}
    slug = Cell(config).slug
    assert slug.startswith("linear-20-seed1-paper-")
    assert slug == Cell(dict(reversed(config.items()))).slug
    assert slug != Cell({**config, "d_key": 32}).slug


def test_commit_without_git(monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *arguments: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert provenance.commit.__wrapped__() == provenance.fastweights.__version__


def test_commit_says_when_files_differ(monkeypatch):
    answers = {"ls-files": "__init__.py", "rev-parse": "abc123", "status": " M base.py"}
    monkeypatch.setattr(provenance, "_git", lambda command, *rest: answers[command])
    assert provenance.commit.__wrapped__() == "abc123+dirty"
    answers["status"] = ""
    assert provenance.commit.__wrapped__() == "abc123"
