"""`fastweights reproduce` and `fastweights report`, with a training that takes no time."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from fastweights.commands import options
from fastweights.commands import reproduce as commands
from fastweights.data.prepare import prepare
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import Claim, Results
from fastweights.report.chapter import Chapter
from fastweights.report.rows import summary
from tests.data.corpora import write_wikitext
from tests.experiments.fakes import Training, without_plots

app = typer.Typer()
app.command()(commands.reproduce)
app.command()(commands.report)


@pytest.fixture
def training(monkeypatch):
    return Training(monkeypatch)


@pytest.fixture(autouse=True)
def _without_plots(request, monkeypatch):
    if request.function not in (test_all_figures, test_report_by_the_best_loss):
        without_plots(monkeypatch)


@pytest.fixture
def run(tmp_path, training):
    def run(*arguments, out=tmp_path / "out"):
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*arguments, "--out", str(out)])

    return run


def test_all_figures(run, training, tmp_path, monkeypatch):
    figures = ("fig1", "fig2", "fig3", "fig4", "fig5")
    result = run("reproduce", *figures, "--scale", "smoke", "--jobs", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert result.stdout.strip().endswith(f"Page: {out / 'index.html'}")
    assert "The delta rule solves the task" in result.stdout
    for name in figures:
        assert json.loads((out / name / "results.json").read_text())["scale"] == "smoke"
        assert (out / name / f"{name}.svg").exists() and (out / name / f"{name}.png").exists()
    assert len(training.trained) == len(set(training.trained)) == 32
    assert "[45/45] fig5, delta rule, FAVOR+ 128, S = 4, seed 1: loss NaN" in result.stderr

    without_plots(monkeypatch)
    again = run("reproduce", *figures, "--scale", "smoke")
    assert again.exit_code == 0 and "16 models, 16 of them known" in again.stderr
    before, page = len(training.trained), out / "index.html"
    page.unlink()
    report = run("report")
    assert report.exit_code == 0 and f"drawing the plots and the page in {out}" in report.stderr
    assert page.exists() and len(training.trained) == before


def test_selections_reach_the_training(run, training):
    options = ["--models", "linear,dpfp-1", "--sizes", "4, 6", "--seeds", "1,2"]
    assert run("reproduce", "fig2", "--scale", "smoke", *options).exit_code == 0
    assert set(training.trained) == {(m, s, seed) for m in ("linear", "dpfp-1") for s in (4, 6) for seed in (1, 2)}
    assert run("reproduce", "fig2", "--scale", "smoke", *options, "--force").exit_code == 0
    assert len(training.trained) == 16


def test_a_selection_may_leave_a_figure_out(run, training):
    result = run("reproduce", "fig2", "fig4", "--scale", "smoke", "--sizes", "4", "--models", "linear")
    assert result.exit_code == 0 and "fig4: nothing to run" in result.stderr
    assert training.trained == [("linear", 4, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "name what to reproduce: fig1"),
        (["reproduce", "fig22"], "unknown figure or table 'fig22'; did you mean 'fig2'?"),
        (["reproduce", "fig2", "--scale", "papers"], "unknown scale 'papers'; did you mean 'paper'?"),
        (["reproduce", "fig2", "--models", "linear,dpfp1"], "unknown model 'dpfp1'; did you mean 'dpfp-1'?"),
        (["reproduce", "fig2", "--models", "dpfp-1-delta"], "unknown model"),
        (["reproduce", "fig2", "--sizes", "20,1"], "--sizes takes whole numbers of at least 2"),
        (["reproduce", "fig2", "--sizes", "20,"], "--sizes takes values separated by commas"),
        (["reproduce", "fig2", "--sizes", "twenty"], "--sizes takes whole numbers"),
        (["reproduce", "fig2", "--seeds", "-1"], "--seeds takes whole numbers of at least 0"),
        (["reproduce", "fig4", "--sizes", "20"], "leaves nothing to run at scale small: fig4 has sizes"),
        (["reproduce", "fig2", "--device", "gpu"], "unknown device 'gpu'"),
        (["reproduce", "fig2", "--device", "cuda:99"], "does not exist"),
        (["reproduce", "fig2", "--device", "meta"], "not supported"),
        (["reproduce", "fig2", "--jobs", "0"], "--jobs must be at least 1"),
        (["reproduce", "fig2", "--data", "x"], "--data is for language and translation models, not for fig2"),
        (["reproduce", "fig2", "--set", "lr=1"], "--set is for language and translation models, not for fig2"),
        (["report"], "there are no results in"),
        (["report", "--loss", "worst"], "unknown loss 'worst'"),
    ],
)
def test_bad_input(run, training, tmp_path, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output
    assert training.trained == [] and not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_written(run, training, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("reproduce", "fig2", "--scale", "smoke", out=tmp_path / "file")
    assert result.exit_code == 2 and "cannot write to" in result.stderr
    result = run("reproduce", "fig2", "--scale", "smoke", out=tmp_path / "file" / "below")
    assert result.exit_code == 2 and "cannot write to" in result.stderr
    assert (tmp_path / "file").read_text() == "mine" and training.trained == []


@pytest.mark.parametrize("content", ['{"format": 99}', '{"format": 1, "experiment": "fi'])
@pytest.mark.parametrize("command", [["report"], ["reproduce", "fig3", "--scale", "smoke"], ["reproduce", "--list"]])
def test_broken_results_stop_every_command(run, training, tmp_path, content, command):
    assert run("reproduce", "fig2", "--scale", "smoke", "--sizes", "4").exit_code == 0
    broken = tmp_path / "out" / "fig2" / "results.json"
    broken.write_text(content)
    files = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    result = run(*command)
    assert result.exit_code == 2 and str(broken) in result.stderr
    assert files == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_all_ends_with_a_summary_of_25_lines(run, training, monkeypatch):
    monkeypatch.setattr(commands, "EXPERIMENTS", {name: EXPERIMENTS[name] for name in ("fig5", "fig2", "fig1", "fig4")})
    result = run("reproduce", "all", "--scale", "small", "--device", "cpu")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) <= 25 and "Page: " in lines[-1]
    assert lines[0] == "Of 17 statements of the paper, 10 hold, 7 not decided at this scale."
    assert lines[1].split("  ") == ["Figure 1", "small scale", "4 hold"]
    assert "Figure 5  small scale  3 not decided at this scale (needs scale paper)" in lines
    begun = [line.split(":")[0] for line in result.stderr.splitlines() if " model" in line and ": " in line]
    assert [name for name in begun if name in EXPERIMENTS] == ["fig2", "fig1", "fig4", "fig5"], (
        "what decides most first"
    )


def test_a_summary_names_what_fails_while_there_is_room():
    fails = Claim("It holds", "it does not", "it does", False)
    chapter = Chapter(EXPERIMENTS["fig2"], None, Results([]), [fails] * 40, None)
    lines = summary([chapter])
    assert len(lines) == 24 and lines[0].endswith("40 fail.") and lines[2] == "  fails: It holds (it does not)"


def test_parts_of_a_sweep(run, training, tmp_path):
    """Every cell in one part, in each folder or in a shared one; copied together, they are the whole sweep."""
    command = ("reproduce", "fig2", "fig4", "fig5", "--scale", "smoke", "--device", "cpu")
    done = []
    for part in ("1/3", "2/3", "3/3"):
        training.trained.clear()
        assert run(*command, "--part", part, out=tmp_path / part[0]).exit_code == 0
        done.append(set(training.trained))
        assert len(training.trained) in (10, 11), "32 cells in three parts"
    assert len(set.union(*done)) == sum(map(len, done)) == 32
    assert all({model for model, _, _ in part} & {"softmax", "schlag2021", "favor-512"} for part in done), "well mixed"
    for part in ("2", "3"):
        for cell in (tmp_path / part).glob("*/cells/*.json"):
            place = tmp_path / "1" / cell.relative_to(tmp_path / part)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(cell.read_bytes())
    assert run("report", out=tmp_path / "1").exit_code == 0
    training.trained.clear()
    assert run(*command, out=tmp_path / "1").exit_code == 0 and training.trained == []
    for part in ("0/2", "3/2", "1", "a/b", "1/2/3"):
        result = run(*command, "--part", part)
        assert (
            result.exit_code == 2 and f"--part takes I/N with I from 1 to N, such as 2/4, got '{part}'" in result.stderr
        )


def test_two_processes_share_a_folder(tmp_path):
    command = [sys.executable, "-m", "fastweights", "reproduce", "fig2", "--scale", "smoke", "--device", "cpu"]
    command += ["--models", "linear,dpfp-1,dpfp-2", "--jobs", "1", "--out", str(tmp_path)]
    parts = [
        subprocess.Popen(
            [*command, "--part", f"{part}/2"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        for part in (1, 2)
    ]
    said = [part.communicate()[1] for part in parts]
    assert [part.returncode for part in parts] == [0, 0], said
    trained = [line.split("] ")[1].split(":")[0] for text in said for line in text.splitlines() if line[:1] == "["]
    assert len(trained) == len(set(trained)) == 6
    assert len(json.loads((tmp_path / "fig2" / "results.json").read_text())["cells"]) == 6


def test_interrupted(run, training, tmp_path):
    training.stop_after = 3
    result = run("reproduce", "fig2", "fig5", "--scale", "smoke")
    assert result.exit_code == 130
    assert "3 of 32 models are done" in result.stderr and "resumes from there" in result.stderr
    training.stop_after = None
    assert run("report").exit_code == 0
    assert run("reproduce", "fig2", "fig5", "--scale", "smoke").exit_code == 0
    assert len(training.trained) == 32
    training.stop_after = 35
    result = run("reproduce", "fig2", "fig5", "--scale", "smoke", "--force")
    assert result.exit_code == 130 and "3 of 32 models are done" in result.stderr
    assert "not reached keep the results they had" in result.stderr and "resumes" not in result.stderr


def test_report_takes_up_cells_of_a_killed_sweep(run, training, tmp_path):
    run("reproduce", "fig2", "--scale", "smoke")
    results = tmp_path / "out" / "fig2" / "results.json"
    complete = results.read_bytes()
    results.unlink()
    assert run("report").exit_code == 0
    assert results.read_bytes() == complete


def test_list(run, training):
    fresh = run("reproduce", "--list")
    assert fresh.exit_code == 0 and fresh.stdout.count("none") == len(EXPERIMENTS) and "240 models" in fresh.stdout
    run("reproduce", "fig3", "--scale", "smoke")
    assert "smoke: 4 models, 6.0 s of training" in run("reproduce", "--list").stdout


def test_report_takes_a_corpus_that_results_were_made_with(run, training, tmp_path):
    assert run("reproduce", "fig3", "--scale", "smoke").exit_code == 0
    result = run("report", "--data", str(tmp_path / "nothing"))
    assert result.exit_code == 2 and f"there is no corpus in {tmp_path / 'nothing'}" in result.stderr
    write_wikitext(tmp_path / "text")
    prepare("wikitext2", tmp_path / "text", tmp_path / "corpus", allow_other=True)
    result = run("report", "--data", str(tmp_path / "corpus"))
    assert result.exit_code == 2 and "was made with the corpus in" in result.stderr
    assert not (tmp_path / "out" / "corpora.json").exists()


def test_report_by_the_best_loss(run, training, tmp_path):
    run("reproduce", "fig2", "--scale", "smoke", "--sizes", "4")
    assert run("report", "--loss", "best").exit_code == 0
    assert "Best evaluation loss" in (tmp_path / "out" / "index.html").read_text()


def test_without_matplotlib(run, training, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    result = run("reproduce", "fig2", "--scale", "smoke")
    assert result.exit_code == 2 and "pip install 'fastweights[experiments]'" in result.stderr


@pytest.mark.parametrize(
    ("missing", "name", "extras"),
    [("lightning_fabric", "table2", "train"), ("lightning_fabric", "speed", "train"), ("sacrebleu", "table1", "mt")],
)
def test_without_an_extra(run, training, monkeypatch, tmp_path, missing, name, extras):
    monkeypatch.setattr(options, "find_spec", lambda package: None if package == missing else object())
    result = run("reproduce", name, "--scale", "smoke")
    assert result.exit_code == 2 and f"{missing}: pip install 'fastweights[{extras}]'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_import_that_fails_in_a_cell(run, monkeypatch):
    def train(*arguments, **options):
        raise ImportError("training takes something: pip install 'fastweights[train]'")

    monkeypatch.setattr("fastweights.experiments.engine.retrieval.train", train)
    result = run("reproduce", "fig2", "--scale", "smoke")
    assert result.exit_code == 2 and "Error: training takes something: pip install" in result.stderr


def test_the_live_display(run, training, monkeypatch, tmp_path):
    from rich.console import Console

    from fastweights.commands.progress import Display
    from fastweights.experiments.engine.store import Store
    from fastweights.experiments.engine.sweep import sweep

    with (tmp_path / "screen").open("w+") as screen:
        console = Console(file=screen, force_terminal=True, width=200)
        fig2 = EXPERIMENTS["fig2"]
        with Display(console, 16) as display:
            sweep(fig2, fig2.cells("smoke"), Store(tmp_path / "out"), display)
        screen.seek(0)
        shown = screen.read()
    assert "16/16" in shown and "left" in shown


def test_the_commands_start_without_matplotlib():
    code = "import sys, fastweights.commands.reproduce; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
