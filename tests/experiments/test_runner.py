"""Cells that are runs of the training loop: interrupted, gone on with, side by side, diverging, and from the CLI."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fastweights.commands import progress
from fastweights.commands import reproduce as commands
from fastweights.data.prepare import prepare
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine import corpora, language_tables
from fastweights.experiments.engine.experiment import Results, Setup, UserInput
from fastweights.experiments.engine.runner import POINTS, measurements, start_afresh
from fastweights.training.engine.task import Score
from tests.experiments.fakes import without_plots
from tests.experiments.language_fakes import record
from tests.training.small_text import write_text

TABLES = ("table2", "table3", "table4", "table5", "speed")
app = typer.Typer()
app.command()(commands.reproduce)
app.command()(commands.report)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small text in place of the documentation of Python."""
    folder = tmp_path_factory.mktemp("data")
    prepare("text", write_text(folder / "text.txt"), folder / "fables")
    return folder / "fables"


@pytest.fixture(autouse=True)
def _embedded(request, monkeypatch, corpus):
    monkeypatch.setattr(corpora, "_embedded", lambda: corpus)
    if request.function is not test_every_table_from_the_command_line:
        without_plots(monkeypatch)


@pytest.fixture
def invoke(tmp_path):
    def invoke(*arguments, out=tmp_path / "out"):
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*arguments, "--out", str(out)])

    return invoke


def cells(name, models, **settings):
    given = EXPERIMENTS[name].inputs_for("smoke", UserInput(settings=settings))
    found = [cell for cell in EXPERIMENTS[name].cells("smoke", None, given.config) if cell.config["model"] in models]
    return found, given.data


def setup(folder, data, report=lambda cell, step, loss: None, **options):
    return Setup(on_progress=report, folder=folder, data=data, **{"device": "cpu", "jobs": 1, **options})


def steady(metrics):
    """What does not depend on how fast it went."""
    return {name: value for name, value in metrics.items() if name not in ("tokens_per_s", "memory_bytes")}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The metrics of two cells that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_embedded", lambda: corpus)
        chosen, data = cells("table4", ("delta-carried", "xl"), steps=8)
    found = language_tables.run(chosen, setup(tmp_path_factory.mktemp("runs"), data))
    return chosen, data, {cell.slug: outcome.metrics for cell, outcome in found}


def test_metrics(whole):
    chosen, _, metrics = whole
    xl = next(metrics[cell.slug] for cell in chosen if cell.config["model"] == "xl")
    assert [step for step, _ in xl["curve"]] == [2, 4, 6, 8] and xl["steps"] == 8
    assert xl["tokens"] == 8 * 4 * 16 and xl["best_loss"] == min(loss for _, loss in xl["curve"])
    assert len(xl["training_curve"]) == 8 and xl["tokens_per_s"] > 0 and xl["memory_bytes"] > 0
    assert [found["mem_len"] for found in xl["evaluations"]] == [3, 16]
    assert [found["state_size"] for found in xl["evaluations"]] == [(3 + 1) * 32, (16 + 16) * 32]
    assert xl["test"] == xl["evaluations"][-1]["test"] != xl["evaluations"][0]["test"]
    delta = next(metrics[cell.slug] for cell in chosen if cell.config["model"] == "delta-carried")
    assert delta["state_size"] == xl["evaluations"][0]["state_size"], (
        "the smallest memory is as large as the fast weights"
    )
    assert delta["evaluations"] == [] and delta["valid"]["ppl"] == pytest.approx(math.exp(delta["valid"]["loss"]))


def test_an_interrupted_cell_goes_on(whole, tmp_path):
    chosen, data, expected = whole

    def interrupt(cell, step, loss):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        list(language_tables.run(chosen, setup(tmp_path / "runs", data, interrupt)))
    started = tmp_path / "runs" / chosen[0].slug
    assert list((started / "checkpoints").glob("step-*5")) and not (tmp_path / "runs" / chosen[1].slug).exists()
    steps = []
    found = list(
        language_tables.run(chosen, setup(tmp_path / "runs", data, lambda cell, step, loss: steps.append(step)))
    )
    assert steps[0] == 6, "not from the beginning"
    assert {cell.slug: steady(outcome.metrics) for cell, outcome in found} == {
        slug: steady(metrics) for slug, metrics in expected.items()
    }
    assert not (tmp_path / "runs").exists(), "weights of finished cells are not kept unless asked for"


def test_an_evaluation_is_not_repeated(whole, tmp_path, monkeypatch):
    from fastweights.training.tasks import evaluate

    chosen, data, expected = whole
    calls, measure = [], evaluate.measure

    def stopping(model, stream, how):
        calls.append(how)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(model, stream, how)

    monkeypatch.setattr(evaluate, "measure", stopping)
    xl = [cell for cell in chosen if cell.config["model"] == "xl"]
    with pytest.raises(KeyboardInterrupt):
        list(language_tables.run(xl, setup(tmp_path / "runs", data)))
    (found,) = language_tables.run(xl, setup(tmp_path / "runs", data, keep=True))
    assert len(calls) == 5, "two texts with two memories, and the one that was stopped"
    assert steady(found[1].metrics) == steady(expected[xl[0].slug])
    assert (tmp_path / "runs" / xl[0].slug / "config.json").exists(), "kept"


@pytest.mark.slow
def test_cells_side_by_side(whole, tmp_path):
    chosen, data, expected = whole
    reported = []
    report = lambda cell, step, loss: reported.append((cell.slug, step))  # noqa: E731
    found = list(language_tables.run(chosen, setup(tmp_path / "runs", data, report, jobs=2)))
    assert {cell.slug: steady(outcome.metrics) for cell, outcome in found} == {
        slug: steady(metrics) for slug, metrics in expected.items()
    }
    assert set(reported) >= {(cell.slug, step) for cell in chosen for step in range(1, 9)}


@pytest.mark.slow
def test_leaving_saves_the_cells_under_way(corpus, tmp_path):
    chosen, data = cells("table4", ("delta-carried", "linear-carried"), steps=100_000, log_every=1)
    assert chosen[0].config["steps"] == 100_000

    class Enough(Exception):
        pass

    seen = set()

    def report(cell, step, loss):
        seen.add(cell.slug)
        if len(seen) == 2:
            raise Enough

    with pytest.raises(Enough):
        list(language_tables.run(chosen, setup(tmp_path / "runs", data, report, jobs=2)))
    for cell in chosen:
        assert list((tmp_path / "runs" / cell.slug / "checkpoints").glob("step-*")), "saved before it ended"


def test_a_forced_cell_begins_anew(whole, tmp_path):
    chosen, data, expected = whole
    chosen = chosen[:1]

    def steps(**options):
        taken = []
        report = lambda cell, step, loss: taken.append(step)  # noqa: E731
        ((cell, outcome),) = language_tables.run(chosen, setup(tmp_path / "runs", data, report, **options))
        assert steady(outcome.metrics) == steady(expected[cell.slug])
        return sorted(set(taken))

    assert steps(keep=True) == list(range(1, 9))
    assert steps(keep=True) == [], "what was kept is finished"
    assert steps(force=True) == list(range(1, 9))


def test_the_command_line_can_force(invoke, tmp_path):
    options = ["table2", "--scale", "smoke", "--models", "linear", "--jobs", "1", "--device", "cpu", "--keep-runs"]
    assert invoke("reproduce", *options).exit_code == 0
    (run,) = (tmp_path / "out" / "table2" / "runs").iterdir()
    (run / "mark").touch()
    assert invoke("reproduce", *options).exit_code == 0 and (run / "mark").exists()
    assert invoke("reproduce", *options, "--force").exit_code == 0
    assert (run / "config.json").exists() and not (run / "mark").exists()


def test_a_peak_that_cannot_be_forgotten(monkeypatch):
    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    start_afresh("cpu")


def test_nothing_compiled_is_left_to_the_next_cell():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    work = torch.compile(lambda x: x + 1, backend=backend)
    for _ in range(2):
        work(torch.ones(1))
    assert len(compiled) == 1
    start_afresh("cpu")
    work(torch.ones(1))
    assert len(compiled) == 2


def test_a_failure_in_a_cell_is_told(corpus, tmp_path):
    from fastweights.experiments.engine.experiment import BadInput

    chosen, data = cells("table2", ("delta",))
    changed = [type(cell)({**cell.config, "corpus": {**cell.config["corpus"], "fingerprint": "0"}}) for cell in chosen]
    with pytest.raises(BadInput, match="was changed"):
        list(language_tables.run(changed, setup(tmp_path / "runs", data)))
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES=1"):
        list(language_tables.run(chosen, setup(tmp_path / "runs", data, device="cuda:1")))


def test_divergence_is_a_result(corpus, tmp_path):
    chosen, data = cells("table4", ("linear-carried",), lr=1e38, warmup=0, clip=None)
    ((cell, outcome),) = language_tables.run(chosen, setup(tmp_path / "runs", data))
    assert 1 <= outcome.metrics["diverged_at"] <= 4 and "test" not in outcome.metrics
    results = Results([record(cell, outcome.metrics)])
    table = EXPERIMENTS["table4"].table(results)
    assert table.rows[0][1:3] == ("diverged", "diverged")
    assert json.dumps(outcome.metrics, allow_nan=False)


def test_measurements_of_a_log():
    log = [{"kind": "event", "step": 0}]
    log += [
        {
            "kind": "train",
            "step": n,
            "loss": 1.0 / n,
            "tokens": 10 * n,
            "tokens_per_s": n,
            "memory_bytes": 5,
            "wall_s": n,
        }
        for n in range(1, 1001)
    ]
    log += [
        {"kind": "valid", "step": n, "bleu": value, "wall_s": n} for n, value in ((500, 3.0), (750, "nan"), (1000, 2.0))
    ]
    found = measurements(log, Score("bleu", higher_is_better=True))
    assert (found["best_bleu"], found["last_bleu"]) == (3.0, 2.0) and "best_loss" not in found
    assert found["curve"] == [[500, 3.0], [750, None], [1000, 2.0]]
    assert len(found["training_curve"]) <= POINTS and found["tokens"] == 10_000 and found["tokens_per_s"] == 500.5
    assert measurements([], Score("loss"))["best_loss"] is None


def test_every_table_from_the_command_line(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_SILENCE", 0.0)
    result = invoke("reproduce", *TABLES, "--scale", "smoke", "--jobs", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    out, page = tmp_path / "out", (tmp_path / "out" / "index.html").read_text()
    for name in TABLES:
        content = json.loads((out / name / "results.json").read_text())
        assert len(content["cells"]) == len(EXPERIMENTS[name].grid("smoke"))
        assert (out / name / f"{name}.png").exists() and not (out / name / "runs").exists()
        rows = EXPERIMENTS[name].table(Results([])).header
        section = page.split(f'<section id="{name}">')[1].split("</section>")[0]
        said_once = section.split("In every row: ")[1] if "In every row: " in section else ""
        assert all(f'<th scope="col">{column}' in section or column in said_once for column in rows)
    cells = [path.stem for path in out.glob("*/cells/*.json")]
    assert len(set(cells)) == 16 + 12 and len(cells) == 5 + 4 + 6 + 5 + 12, "equal cells are trained once"
    assert result.stderr.count("after 4 steps") == 16 and result.stderr.count(" words/s, ") == 12
    assert "table4, Transformer-XL, D = 16: step 3 of 4, loss" in result.stderr, "a long training says where it is"
    assert "Delta Network" in page and "fables" in page and page.count('<div class="plot"') == len(TABLES)
    assert "http:" not in page and "https:" not in page
    without_plots(monkeypatch)
    again = invoke("reproduce", *TABLES, "--scale", "smoke")
    assert again.exit_code == 0 and "after" not in again.stderr
    listed = invoke("reproduce", "--list").stdout
    assert "smoke: 5 models" in listed and "12.3 G words each small model" in listed


def test_runs_can_be_kept_and_settings_shown(invoke, tmp_path):
    options = ["--models", "linear", "--set", "dropout=0.2", "--set", "log_every=3", "--keep-runs"]
    result = invoke("reproduce", "table2", "--scale", "smoke", *options)
    assert result.exit_code == 0, result.output
    (run,) = (tmp_path / "out" / "table2" / "runs").iterdir()
    config = json.loads((run / "config.json").read_text())
    assert config["task"]["model"]["dropout"] == 0.2 and config["training"]["log_every"] == 3
    assert "--set dropout=0.2" in (tmp_path / "out" / "index.html").read_text()


def test_a_full_scale_takes_its_corpus_among_several(corpus, monkeypatch, tmp_path):
    from dataclasses import replace

    words = json.loads((corpus / "manifest.json").read_text())["vocabulary"]["size"]
    monkeypatch.setattr(corpora, "WIKITEXT103", replace(corpora.WIKITEXT103, words=words))
    (tmp_path / "other.txt").write_text("a b c d\n" * 200)
    prepare("text", tmp_path / "other.txt", tmp_path / "other")
    given = corpora.make_inputs("paper", UserInput((tmp_path / "other", corpus)))
    assert given.data == corpus and given.config["corpus"]["words"] == words
    assert given.config["corpus"]["name"] == "fables", "named after the corpus that was used"


def test_a_name_that_is_not_deserved():
    for official, name, expected in (
        (True, "WikiText-2", "WikiText-2"),
        (False, "WikiText-2", "WikiText-2 (not the official corpus)"),
        (False, "wikitext-103-raw", "wikitext-103-raw (not the official corpus)"),
        (False, "text.txt", "text.txt"),
    ):
        assert corpora.name_with_warning(name, {"official": official}) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table2", "--scale", "paper"], "table2: scale paper needs WikiText-103, or a corpus of as many words (267,7"
         "35): `fastweights data wikitext103 --source DIR --out data/wikitext103`, then --data data/wikitext103"),
        (["table2", "--scale", "wikitext2"], "`fastweights data wikitext2"),
        (["fig1", "table4", "--scale", "code"], "table4: scale code needs WikiText-103"),
        (["table2", "--scale", "paper", "--data", "CORPUS"], "CORPUS has 22 (fables)"),
        (["table2", "--scale", "paper", "--data", "CORPUS/none"], "which does not exist"),
        (["table2", "--scale", "paper", "--data", "EMPTY"], "was not finished or is something else"),
        (["table2", "--scale", "small", "--data", "CORPUS"], "--data is for scales paper and code"),
        (["table2", "--scale", "smoke", "--set", "lr"], "--set takes FIELD=VALUE"),
        (["table2", "--scale", "smoke", "--set", "lr=1", "--set", "lr=2"], "lr is given twice"),
        (["table2", "--scale", "smoke", "--set", "d_modell=3"], "did you mean 'd_model'"),
        (["table2", "--scale", "smoke", "--set", "seed=3"], "--seeds"),
        (["speed", "--scale", "smoke", "--set", "devices=2"], "devices is not for --set: it follows from --device"),
        (["table2", "--scale", "smoke", "--set", "precision=bf17"], "precision"),
        (["table2", "--scale", "smoke", "--set", "steps=abc"], "table2: steps takes int, got 'abc'; write it as"),
        (["speed", "--scale", "smoke", "--set", "dropout=[1]"], "speed: dropout takes float, got '[1]'"),
        (["table4", "--scale", "smoke", "--set", "documents=paragraphs"], "does not forget where a document begins"),
        (["table2", "--scale", "smoke", "--sizes", "20"], "leaves nothing to run at scale smoke"),
    ],
)  # fmt: skip
def test_bad_input(invoke, corpus, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {"CORPUS": str(corpus), "EMPTY": str(tmp_path / "empty")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    result = invoke("reproduce", *arguments)
    assert result.exit_code == 2, result.output
    assert message.replace("CORPUS", str(corpus)) in result.stderr and "Traceback" not in result.output
    assert not Path(tmp_path / "out").exists()


def test_embedded_corpus(monkeypatch, tmp_path):
    """The real one, prepared where `train lm` prepares it too."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    given = EXPERIMENTS["table2"].inputs_for("small", UserInput())
    assert given.data == Path("data") / "embedded" and given.config["corpus"]["name"] == "Python's documentation"


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_disk_too_full_for_the_weights(invoke, tmp_path, jobs):
    # A file where the folder of checkpoints should be: the process that trains may be another one.
    for cell in cells("table2", ("linear", "delta"))[0]:
        folder = tmp_path / "out" / "table2" / "runs" / cell.slug
        folder.mkdir(parents=True)
        (folder / "checkpoints").touch()
    options = ["table2", "--scale", "smoke", "--models", "linear,delta", "--jobs", jobs, "--device", "cpu"]
    result = invoke("reproduce", *options)
    assert result.exit_code == 1 and "Error: " in result.stderr and "Traceback" not in result.output
