"""An experiment from outside the package: one file that registers itself, trained, judged and shown like any other."""

import sys
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from fastweights.commands import reproduce as commands
from fastweights.experiments import EXPERIMENTS, register_experiment

app = typer.Typer()
app.command()(commands.reproduce)
app.command()(commands.report)

FILE = """
from fastweights.experiments import register_experiment
from fastweights.experiments.engine.experiment import CellOutcome, Claim, Experiment, Plot, Scale, Table


def configure(scale, model, size, seed):
    return {"scale": scale, "model": model, "rule": "none", "size": size, "seed": seed}


def run(cells, setup):
    for cell in cells:
        loss = cell.config["size"] ** (-1.0 if cell.config["model"] == "fast" else -0.5)
        setup.on_progress(cell, 1, loss)
        yield cell, CellOutcome({"best_loss": loss, "last_loss": loss, "steps": 1}, 0.1)


def claims(results):
    lower = [results.mean("fast", size) < results.mean("slow", size) for size in results.sizes("fast", "slow")]
    ours = f"at {sum(lower)} of {len(lower)}"
    return [Claim("The fast one is lower", ours, "everywhere", all(lower) if lower else None)]


def table(results):
    rows = [(record.config["model"], f"{record.metrics['best_loss']:.3f}") for record in results.records]
    return Table(("model", "loss"), tuple(rows))


def draw(figure, experiment, results):
    figure.add_subplot().plot(results.sizes(), [results.mean("fast", size) for size in results.sizes()])


register_experiment(
    Experiment(
        name="decay",
        title="Two ways to fall",
        where="nowhere in the paper",
        statement="One falls faster than the other.",
        models={"fast": "the fast one", "slow": "the slow one"},
        scales={"smoke": Scale(sizes=(2, 4), cost="1 s")},
        configure=configure,
        run=run,
        claims=claims,
        plot=Plot(kind=draw, x_label="size", y_label="loss"),
        table=table,
        stored={"metrics": {"best_loss": float}},
    )
)
"""


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = dict(EXPERIMENTS)

    def invoke(*arguments):
        options = ["--out", str(tmp_path / "out"), "--load", str(tmp_path / "decaying.py")]
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*arguments, *options])

    yield invoke
    EXPERIMENTS.clear()
    EXPERIMENTS.update(known)
    sys.modules.pop("decaying", None)


def test_it_is_run_judged_and_shown(invoke, tmp_path):
    (tmp_path / "decaying.py").write_text(FILE)
    result = invoke("reproduce", "decay", "--scale", "smoke", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "[4/4] decay, the slow one, S = 4, seed 1: loss 0.5000" in result.stderr and "at 2 of 2" in result.stdout
    assert (tmp_path / "out" / "decay" / "decay.svg").exists()
    page = tmp_path / "out" / "index.html"
    for text in ("Two ways to fall", "One falls faster", "<td>fast</td><td>0.500</td>", "✓"):
        assert text in page.read_text()
    page.unlink()
    assert invoke("report").exit_code == 0 and "Two ways to fall" in page.read_text()
    listed = invoke("reproduce", "--list")
    assert listed.exit_code == 0 and "smoke: 4 models" in listed.stdout
    result = invoke("reproduce", "decay", "--scale", "paper")
    assert result.exit_code == 2 and "decay has scales smoke" in result.stderr


def test_a_file_that_is_not_there_or_has_the_name_of_another_module(invoke, tmp_path):
    result = invoke("reproduce", "--list")
    assert result.exit_code == 2 and f"there is no file {tmp_path / 'decaying.py'}" in result.stderr
    (tmp_path / "json.py").write_text("")
    result = invoke("reproduce", "--list", "--load", str(tmp_path / "json.py"))
    assert result.exit_code == 2


def test_what_cannot_be_registered():
    fig1 = EXPERIMENTS["fig1"]
    assert register_experiment(fig1) is fig1
    with pytest.raises(ValueError, match="already is an experiment 'fig1'"):
        register_experiment(replace(fig1))
    with pytest.raises(ValueError, match=r"made of a-z.*got '<b>'"):
        register_experiment(replace(fig1, name="<b>"))
    with pytest.raises(ValueError, match="must be some of smoke, small, code, paper, got huge"):
        register_experiment(replace(fig1, name="fig9", scales={"huge": fig1.scales["smoke"]}))
