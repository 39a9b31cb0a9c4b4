"""`train mt`, `eval mt` and `translate`: from pairs to a model to scores and translations; wrong input."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.inference.translate import translate
from fastweights.training.runs.saved import TranslationRun
from fastweights.training.tasks.bleu import bleu
from tests.training.small_pairs import SMALL, small_pairs
from tests.training.small_text import as_options, small_corpus, spoil
from tests.training.small_text import run as run_lm
from tests.training.tiny import losses

QUICK = as_options({name: value for name, value in SMALL.items() if name not in ("steps", "lr", "seed", "max_tokens")})
RUNS = {
    "softmax": [],
    "dpfp": ["--nu", "3", "--rule", "delta", "--cross", "linear"],
    "performer": ["--features", "5", "--precision", "bf16"],
}


def run(*arguments, input=None):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(part) for part in arguments], input=input)


def train_mt(corpus, out, *more, lr=0.01, seed=3):
    where = ("--preset", "tiny", "--data", corpus.folder, "--out", out, "--tokens", 200)
    return run("train", "mt", *where, "--steps", 12, "--lr", lr, "--seed", seed, *QUICK, *more)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run of each of some kinds of attention."""
    folder = tmp_path_factory.mktemp("runs")
    for attention, options in RUNS.items():
        done = train_mt(corpus, folder / attention, "--attention", attention, *options)
        assert done.exit_code == 0, done.output
        assert "Best validation BLEU" in done.stdout
        assert f"fastweights eval mt {folder / attention} --split test" in done.stdout
        assert f"| fastweights translate {folder / attention}" in done.stdout
        assert ("as first drawn" in done.output) is (attention == "performer")
    return folder


def test_the_resolved_configuration_is_kept(corpus, runs):
    performer = json.loads((runs / "performer" / "config.json").read_text())
    assert performer["task"]["model"]["features"] == 5 and performer["training"]["precision"] == "bf16-mixed"
    found = json.loads((runs / "dpfp" / "config.json").read_text())
    model = found["task"]["model"]
    assert [model[place] for place in ("encoder", "decoder", "cross")] == ["dpfp", "dpfp", "linear"]
    assert (model["rule"], model["normalization"], model["nu"]) == ("delta", "sum", 3)
    assert (found["task"]["max_tokens"], found["training"]["steps"]) == (200, 12)
    assert found["about"]["data"] == str(corpus.folder) and found["about"]["commit"]
    assert (runs / "dpfp" / "tokenizer.json").read_bytes() == corpus.tokenizer.dump()


def test_the_same_command_goes_on(corpus, tmp_path):
    options = ("--set", "checkpoint_every=5", "--set", "dropout=0.1")
    assert train_mt(corpus, tmp_path / "whole", *options).exit_code == 0
    first = train_mt(corpus, tmp_path / "parts", *options, "--minutes", "0.000001")
    assert first.exit_code == 0 and "the same command resumes it" in first.stdout
    assert train_mt(corpus, tmp_path / "parts", *options).exit_code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    other = train_mt(corpus, tmp_path / "parts", *options, lr=0.5)
    assert other.exit_code == 2 and "training.lr: 0.01 there, 0.5 asked for" in other.stderr
    assert train_mt(corpus, tmp_path / "parts", *options, "--fresh", lr=0.5).exit_code == 0
    assert (tmp_path / "parts" / "previous-1" / "config.json").exists()


@pytest.mark.parametrize("options", [["--split", "test"], ["--beam", "1", "--length-penalty", "0", "--batch", "2"]])
def test_eval_writes_what_it_prints(corpus, runs, options, tmp_path):
    done = run("eval", "mt", runs / "dpfp", *options, "--out", tmp_path / "found.txt")
    assert done.exit_code == 0, done.output
    split, how = ("test", {}) if "test" in options else ("valid", {"beam": 1, "length_penalty": 0.0})
    (path,) = (runs / "dpfp" / "eval").glob(f"{split}-beam{how.get('beam', 4)}-*-best.json")
    record = json.loads(path.read_text())
    pairs = corpus.split(split)
    model, _ = TranslationRun.open(runs / "dpfp").load("best")
    expected = translate(model, corpus.tokenizer, pairs.sources, **how)
    score = bleu(expected, pairs.targets)
    assert record["bleu"] == score.score and record["signature"] == score.signature
    assert f"BLEU {score.score:.2f}  ({score.signature})" in done.stdout
    assert (tmp_path / "found.txt").read_text().split("\n")[:-1] == expected
    assert record["sentences"] == len(pairs) and record["samples"][0]["reference"] == pairs.targets[0]
    assert {"commit", "hardware", "step", "corpus"} <= set(record)


def test_eval_loses_no_file_to_a_reader_that_has_enough(corpus, runs, tmp_path, closed_stdout):
    out = tmp_path / "found.txt"
    assert run("eval", "mt", runs / "softmax", "--split", "test", "--beam", 2, "--out", out).exit_code == 1
    record = json.loads((runs / "softmax" / "eval" / "test-beam2-penalty0.6-best.json").read_text())
    assert len(out.read_text().splitlines()) == record["sentences"] == len(corpus.split("test"))


def test_eval_loses_no_score_to_a_file_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").touch()
    done = run("eval", "mt", runs / "softmax", "--split", "test", "--beam", 3, "--out", tmp_path / "file" / "found.txt")
    path = runs / "softmax" / "eval" / "test-beam3-penalty0.6-best.json"
    assert done.exit_code == 1 and "found.txt cannot be written" in done.stderr
    assert f"BLEU {json.loads(path.read_text())['bleu']:.2f}" in done.stdout and f"Written to {path}" in done.stdout


def test_translate_keeps_order_and_empty_lines(corpus, runs, tmp_path):
    lines = ["the cat", "", "a big house", "dogs"]
    model, _ = TranslationRun.open(runs / "softmax").load("best")
    for batch in (1, 3):
        done = run("translate", runs / "softmax", "--beam", "2", "--batch", batch, input="\n".join(lines))
        assert done.exit_code == 0, done.output
        assert done.stdout == "".join(f"{line}\n" for line in translate(model, corpus.tokenizer, lines, beam=2))
    assert run("translate", runs / "softmax", input="").stdout == ""
    several = run("translate", runs / "softmax", "--beam", "3", "--n-best", "2", input="the cat\n\ndogs\n").stdout
    rows = [line.split("\t") for line in several.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "3", "3"] and float(rows[0][1]) >= float(rows[1][1])


@pytest.mark.parametrize("command", [["eval", "mt"], ["translate"]])
def test_weights_that_are_not_finite_are_an_error(runs, tmp_path, command):
    spoil(runs / "softmax", tmp_path / "run", float("nan"))
    done = run(*command, tmp_path / "run", input="the cat\n")
    assert done.exit_code == 2 and done.stdout == ""
    assert "is not finite" in done.stderr and "--checkpoint last" in done.stderr
    assert run(*command, tmp_path / "run", "--checkpoint", "last", input="the cat\n").exit_code == 0


def test_eval_as_json(runs):
    done = run("eval", "mt", runs / "softmax", "--beam", 1, "--json")
    path = runs / "softmax" / "eval" / "valid-beam1-penalty0.6-best.json"
    assert done.stdout == path.read_text() and "BLEU" in done.stderr


def test_translate_names_the_line_that_is_not_text(runs):
    done = run("translate", runs / "softmax", input=b"the cat\ndogs\n\xc3\n")
    assert done.exit_code == 2 and "standard input is not UTF-8: 0xc3 in line 3" in done.stderr


def test_translate_needs_no_corpus(runs, tmp_path):
    config = json.loads((runs / "performer" / "config.json").read_text())
    config["about"]["data"] = "/nowhere"
    (tmp_path / "moved").mkdir()
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / "moved" / name).symlink_to(runs / "performer" / name)
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config))
    assert run("translate", tmp_path / "moved", input="the cat\n").exit_code == 0
    lost = run("eval", "mt", tmp_path / "moved")
    assert lost.exit_code == 2 and "/nowhere" in lost.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "mt", "--preset", "tinny"], "did you mean 'tiny'"),
        (["train", "mt", "--preset", "tiny", "--attention", "sofmax"], "did you mean 'softmax'"),
        (["train", "mt", "--preset", "tiny", "--cross", "linaer"], "did you mean 'linear'"),
        (["train", "mt", "--preset", "tiny", "--nu", "2"], "nu = 2 is for dpfp attention"),
        (["train", "mt", "--preset", "tiny", "--rule", "delta"], "fast weights in the decoder"),
        (["train", "mt", "--preset", "tiny", "--set", "d_modle=3"], "did you mean 'd_model'"),
        (["train", "mt", "--preset", "tiny", "--set", "dropout=much"], "dropout takes float"),
        (["train", "mt", "--preset", "tiny", "--minutes", "0"], "--minutes must be above 0"),
        (["train", "mt", "--preset", "tiny", "--data", "nowhere"], "nowhere"),
        (["train", "mt", "--preset", "tiny", "--data", __file__], "is a file where a folder is wanted"),
        (["train", "mt", "--preset", "tiny", "--seed", "1" * 23], "--seed takes whole numbers up to"),
        (["eval", "mt", "nowhere"], "does not exist; `fastweights train mt"),
        (["translate", "nowhere"], "does not exist"),
    ],
)
def test_wrong_input_is_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.stderr
    # Nothing was prepared or begun for it.
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "train"], "unknown split 'train'"),
        (["--beam", "0"], "beam must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--checkpoint", "first"], "unknown checkpoint"),
    ],
)
def test_wrong_evaluation_is_named(runs, options, message):
    done = run("eval", "mt", runs / "softmax", *options)
    assert done.exit_code == 2 and message in done.stderr


def test_a_run_of_another_kind_is_refused(runs, tmp_path):
    run_lm(small_corpus(tmp_path / "text"), tmp_path / "lm", steps=1)
    assert "'language', not of a translation model" in run("eval", "mt", tmp_path / "lm").stderr
    assert "'translation', not of a language model" in run("eval", "lm", runs / "softmax").stderr


@pytest.mark.slow
def test_a_newcomer_needs_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = as_options({"d_model": 8, "n_heads": 1, "d_ff": 8, "bleu_sentences": 2, "tensorboard": False})
    done = run("train", "mt", "--preset", "tiny", "--attention", "linear", "--steps", "2", *sizes)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "data" / "numbers" / "manifest.json").exists()
    assert "runs/mt-tiny-linear at step 2 (finished)" in done.stdout
    assert len(run("translate", "runs/mt-tiny-linear", input="twenty-three\n").stdout.splitlines()) == 1
    default = run("train", "mt", "--steps", "1", *sizes)
    assert default.exit_code == 0 and "runs/mt-quick-linear at step 1 (finished)" in default.stdout


@contextmanager
def translating(folder):
    """`fastweights translate` with pipes at all its ends."""
    # Whoever starts the tests in the background of a shell makes all children deaf to Ctrl-C.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from fastweights.cli import app; sys.argv[0] = 'fastweights'; app()"
    command = [sys.executable, "-c", code, "translate", str(folder), "--beam", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, env=environment, cwd=Path(__file__).parents[1]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(runs):
    with translating(runs / "softmax") as process:
        process.stdin.write("the cat\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        process.stdin.write("the cat\n")
        process.stdin.close()
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["input", "interrupt"])
def test_no_line_waits_for_another(runs, end):
    """Each is translated before the next is written; then the input ends, or somebody presses Ctrl-C."""
    with translating(runs / "softmax") as process:
        for _ in range(2):
            process.stdin.write("the cat\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0], "nothing came"
            assert process.stdout.readline().endswith("\n")
        if end == "input":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == (0 if end == "input" else 130)
        assert process.stdout.read() == "" and "Traceback" not in process.stderr.read()
