"""`reproduce` and `report` on a full disk, on result files that were edited by hand, and with absurd seeds."""

import errno
import json
import random
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fastweights.commands import reproduce as commands
from fastweights.common import files
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Results
from fastweights.experiments.engine.register import known_scales
from fastweights.experiments.engine.shape import mismatch
from fastweights.experiments.engine.store import Store
from fastweights.report.rows import result_rows
from tests.experiments import language_fakes
from tests.experiments.fakes import Training, without_plots

app = typer.Typer()
app.command()(commands.reproduce)
app.command()(commands.report)
SMOKE = ("reproduce", "fig2", "--scale", "smoke", "--sizes", "4", "--device", "cpu", "--jobs", "1")


@pytest.fixture
def training(monkeypatch):
    return Training(monkeypatch)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run(out, training):
    def run(*arguments):
        result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*arguments, "--out", str(out)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


class Disk:
    """A disk that is full in folders whose path contains one of `full`."""

    def __init__(self, monkeypatch):
        without_plots(monkeypatch)
        self.full, write = (), files.write_durably

        def write_durably(path, content):
            if any(str(place) in str(path) for place in self.full):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, content)

        monkeypatch.setattr(files, "write_durably", write_durably)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_full_disk_does_not_lose_the_cell_that_was_trained(run, training, disk, out):
    disk.full = [out / "fig2"]
    result = run(*SMOKE)
    assert result.exit_code == 1 and "No space left on device" in result.stderr and "Traceback" not in result.output
    (kept,) = re.findall(r"kept in (\S+?/fastweights-cell-\S+\.json)", result.stderr)
    assert len(training.trained) == 1 and str(out / "fig2" / "cells") in result.stderr

    disk.full = []
    name = kept.rpartition("/")[2]
    (out / "fig2" / "cells").mkdir(parents=True, exist_ok=True)
    (out / "fig2" / "cells" / name).write_bytes(Path(kept).read_bytes())
    assert run(*SMOKE).exit_code == 0
    assert len(training.trained) == len(set(training.trained)) == 8, "the cell that was kept is not trained again"


def test_every_disk_full(run, disk):
    disk.full = ["/"]
    result = run(*SMOKE)
    assert result.exit_code == 1 and "No other folder took it" in result.stderr


@pytest.mark.parametrize("command", [SMOKE, ("report",)])
def test_a_disk_that_is_full_when_the_page_is_written(run, disk, out, command):
    assert run(*SMOKE).exit_code == 0
    disk.full = ["index.html"]
    result = run(*command)
    assert result.exit_code == 1 and f"{out / 'index.html'}: No space left on device" in result.stderr


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def without(*names):
    def change(content):
        for name in names[:-1]:
            content = content[name]
        del content[names[-1]]

    return change


def setting(value, *names):
    def change(content):
        for name in names[:-1]:
            content = content[name]
        content[names[-1]] = value

    return change


CELL_EDITS = [
    (without("metrics", "curve"), "no 'curve' in 'metrics'"),
    (setting("steep", "metrics", "curve"), "'metrics.curve' is 'steep', not a list"),
    (setting([[100, "x"]], "metrics", "curve"), "'metrics.curve' is 'x', not float | None"),
    (setting([[100]], "metrics", "curve"), "'metrics.curve' has 1 entries in place of 2"),
    (setting("low", "metrics", "best_loss"), "'metrics.best_loss' is 'low', not float | None"),
    (setting("many", "metrics", "steps"), "'metrics.steps' is 'many', not int"),
    (setting("long", "wall_s"), "'wall_s' is 'long', not float"),
    (setting(float("nan"), "metrics", "best_loss"), "NaN is not a number of JSON"),
    (setting("huge", "config", "scale"), "unknown scale 'huge'; known are smoke, small, code, paper"),
    (setting([], "config", "model"), "'config.model' is [], not str"),
]


def test_cells_that_were_edited_are_named_and_the_others_are_shown(run, training, out):
    command = (*SMOKE[:4], "--sizes", "4,8")
    assert run(*command).exit_code == 0
    cells = sorted((out / "fig2" / "cells").iterdir())
    for cell, (change, _) in zip(cells, CELL_EDITS, strict=False):
        edit(cell, change)
    (out / "fig2" / "results.json").unlink()
    result = run("report")
    assert result.exit_code == 0
    for cell, (_, message) in zip(cells, CELL_EDITS, strict=False):
        assert any(str(cell) in line and message in line for line in result.stderr.splitlines()), message
    assert len(json.loads((out / "fig2" / "results.json").read_text())["cells"]) == 16 - len(CELL_EDITS)
    assert run(*command).exit_code == 0
    assert len(training.trained) == 16 + len(CELL_EDITS), "they count as not run"


def test_results_that_were_edited(run, out):
    edits = [
        (setting("long", "wall_s"), "cell 1: 'wall_s' is 'long', not float"),
        (setting("huge", "config", "scale"), "cell 2: unknown scale 'huge'"),
        (setting("a/b", "config", "model"), "cell 3: 'config.model' is 'a/b', which cannot be part of a file name"),
        (without("config"), "cell 4: no 'config'"),
        (without("metrics", "curve"), "no 'curve' in 'metrics'"),
    ]
    assert run(*SMOKE).exit_code == 0
    for path in (out / "fig2" / "cells").iterdir():
        path.unlink()
    results = out / "fig2" / "results.json"
    for number, (change, _) in enumerate(edits):
        edit(results, lambda content, number=number, change=change: change(content["cells"][number]))
    text = results.read_text()
    result = run("report")
    assert result.exit_code == 0
    for _, message in edits:
        assert any(str(results) in line and message in line for line in result.stderr.splitlines()), message
    assert "<dt>models</dt><dd>3 (16 planned at this scale)</dd>" in (out / "index.html").read_text()
    stopped = run(*SMOKE)
    assert stopped.exit_code == 2 and edits[0][1] in stopped.stderr
    assert results.read_text() == text, "what cannot be read is not overwritten"


@pytest.mark.parametrize("scale", ["huge", {}, None])
def test_results_of_an_unknown_scale(run, out, scale):
    fig1 = ("reproduce", "fig1", "--scale", "smoke")
    assert run(*fig1).exit_code == 0
    edit(out / "fig1" / "results.json", setting(scale, "scale"))
    warnings = []
    found, records = Store(out, warnings.append).current(EXPERIMENTS["fig1"])
    assert found == "smoke" and len(records) == 1
    assert warnings == [
        f"{out / 'fig1' / 'results.json'} has the unknown scale {scale!r}; known are {', '.join(known_scales())}"
    ]


def test_markup_in_results_is_shown_as_text(run, out):
    store, evil = Store(out), "<script>alert(1)</script> [/bold] [red]"
    given = language_fakes.given("table2", "small")
    given["corpus"] = {**given["corpus"], "name": evil}
    for cell in EXPERIMENTS["table2"].cells("small", None, given):
        record = language_fakes.record(cell, language_fakes.metrics(60.0, 61.0, sets={"valid": evil, "test": evil}))
        object.__setattr__(record, "hardware", evil)
        store.save("table2", record)
    assert run("report").exit_code == 0
    text = (out / "index.html").read_text()
    assert "<script>" not in text and "&lt;script&gt;alert(1)" in text


def test_a_seed_of_23_digits(run, training, out):
    result = run("reproduce", "fig2", "--scale", "smoke", "--seeds", "1" * 23)
    assert result.exit_code == 2 and "--seeds takes whole numbers up to" in result.stderr
    assert not out.exists() and training.trained == []


def places(value, path=()):
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


@pytest.mark.parametrize("name", ["fig3", "table2", "table4"])
def test_whatever_is_edited_is_refused_or_shown(name, tmp_path):
    """Deletes or replaces anything in the metrics of a cell: the record is left out, or everything works with it."""
    experiment, generator = EXPERIMENTS[name], random.Random(5)
    if name == "fig3":
        shown = experiment.cells("smoke")
        metrics = {
            "best_loss": 0.1,
            "last_loss": 0.1,
            "steps": 20,
            "stopped": "steps",
            "curve": [[10, 0.3], [20, None]],
        }
    else:
        shown = language_fakes.cells(name, "small")
        scores = language_fakes.metrics(60.0, 61.0)
        metrics = {**scores, "evaluations": [{**scores, "mem_len": 7}, {**scores, "mem_len": 16}]}
    records = [language_fakes.record(cell, metrics) for cell in shown]
    store, refused = Store(tmp_path), 0
    for _ in range(150):
        changed = json.loads(json.dumps(metrics))
        path = generator.choice([path for path in places(changed) if path])
        value = generator.choice([None, "x", [], {}, [[1, 2]], -1, 2.5, True])
        (without(*path) if generator.random() < 0.3 else setting(value, *path))(changed)
        edited = generator.randrange(len(records))
        all_records = [language_fakes.record(c, changed if i == edited else metrics) for i, c in enumerate(shown)]
        complete = [record for record in all_records if store.is_complete(experiment, record)]
        refused += len(complete) < len(all_records)
        results = Results(complete)
        assert experiment.judge("small", results) and result_rows(experiment, results)
        if experiment.table:
            assert experiment.table(results).rows
    assert 10 < refused < 150
    assert all(store.is_complete(experiment, record) for record in records)


def test_shapes():
    assert mismatch({"a": [[1, 2.0], [2, None]]}, {"a": [(int, float | None)], "b?": str}) is None
    assert mismatch(True, int, "x") == "'x' is True, not int"
    assert mismatch({"a": {}}, {"a": {"b": int}}) == "no 'b' in 'a'"
    assert mismatch([1], {}, "x") == "'x' is [1], not an object"
    assert mismatch({"b": 1}, lambda value: {"a": int} if "a" in value else {"b": str}) == "'b' is 1, not str"
