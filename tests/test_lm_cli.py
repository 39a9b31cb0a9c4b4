"""`train lm`, `eval lm` and `generate`: from a text to a model to numbers and words; wrong input; being stopped."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.commands import results
from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus
from fastweights.training.tasks import evaluate as protocols
from tests.training.small_text import SMALL, as_options, small_corpus, spoil
from tests.training.tiny import losses

OPTIONS = ("steps", "lr", "seed", "cutoffs")
QUICK = as_options({name: value for name, value in SMALL.items() if name not in OPTIONS})
MIXERS = {
    "delta": ["--context", "carried"],
    "transformer": [],
    "performer": ["--features", "3", "--precision", "bf16"],
    "xl": [],
    "dpfp": ["--rule", "delta", "--nu", "2", "--positions", "none"],
    "gated-deltanet": ["--context", "carried", "--documents", "paragraphs"],
    "kda": ["--context", "carried", "--precision", "bf16"],
}


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(part) for part in arguments])


def train_lm(corpus, out, *more, lr=0.02, seed=3):
    where = ("--preset", "tiny", "--data", corpus.folder, "--out", out)
    return run("train", "lm", *where, "--steps", 20, "--lr", lr, "--seed", seed, *QUICK, *more)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run of each of some mixers."""
    folder = tmp_path_factory.mktemp("runs")
    for mixer, options in MIXERS.items():
        done = train_lm(corpus, folder / mixer, "--mixer", mixer, *options)
        assert done.exit_code == 0, done.output
        assert "Best validation perplexity" in done.stdout
        assert f"fastweights eval lm {folder / mixer}" in done.stdout
        assert f"fastweights generate {folder / mixer}" in done.stdout
    return folder


def test_the_resolved_configuration_is_kept(corpus, runs):
    performer = json.loads((runs / "performer" / "config.json").read_text())
    assert performer["task"]["model"]["feature_map_options"]["m"] == 3
    assert performer["training"]["precision"] == "bf16-mixed"
    found = json.loads((runs / "dpfp" / "config.json").read_text())
    model = found["task"]["model"]
    assert (model["rule"], model["feature_map_options"], model["positions"]) == ("delta", {"nu": 2}, "none")
    assert (model["d_model"], model["vocab_size"], found["training"]["steps"]) == (16, corpus.tokenizer.size, 20)
    assert found["about"]["data"] == str(corpus.folder) and found["about"]["commit"]
    assert (runs / "dpfp" / "vocabulary.txt").read_bytes() == (corpus.folder / "vocabulary.txt").read_bytes()


def test_the_same_command_goes_on(corpus, tmp_path):
    options = ("--context", "carried", "--set", "checkpoint_every=5")
    assert train_lm(corpus, tmp_path / "whole", *options).exit_code == 0
    first = train_lm(corpus, tmp_path / "parts", *options, "--minutes", "0.000001")
    assert first.exit_code == 0 and "the same command resumes it" in first.stdout
    assert train_lm(corpus, tmp_path / "parts", *options).exit_code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    again = train_lm(corpus, tmp_path / "parts", *options)
    assert again.exit_code == 0 and "(finished)" in again.stdout
    other = train_lm(corpus, tmp_path / "parts", *options, lr=0.5)
    assert other.exit_code == 2 and "training.lr: 0.02 there, 0.5 asked for" in other.stderr


def test_another_run_is_moved_aside_only_when_told(corpus, runs, tmp_path):
    shutil.copytree(runs / "delta", tmp_path / "run")
    refused = train_lm(corpus, tmp_path / "run", *MIXERS["delta"], seed=8)
    assert refused.exit_code == 2 and "--fresh starts anew" in refused.stderr
    assert train_lm(corpus, tmp_path / "run", *MIXERS["delta"], "--fresh", seed=8).exit_code == 0
    assert (tmp_path / "run" / "previous-1" / "config.json").exists()


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("delta", ["--protocol", "segment"]),
        ("delta", ["--protocol", "carried"]),
        ("delta", ["--protocol", "sliding", "--batch", "5", "--split", "test"]),
        ("dpfp", ["--protocol", "carried", "--segment", "5"]),
        ("transformer", ["--protocol", "sliding", "--stride", "4", "--checkpoint", "last"]),
        ("xl", ["--protocol", "carried", "--mem-len", "15"]),
        ("xl", ["--protocol", "carried", "--mem-len", "24", "--clamp-len", "9"]),
    ],
)
def test_eval_writes_what_it_prints(corpus, runs, mixer, options):
    before = set((runs / mixer / "eval").glob("*"))
    done = run("eval", "lm", runs / mixer, *options)
    assert done.exit_code == 0, done.output
    (path,) = set((runs / mixer / "eval").glob("*")) - before
    record = json.loads(path.read_text())
    assert f"perplexity {record['ppl']:.3f}, {record['bits_per_token']:.4f} bits per word" in done.stdout
    assert f"Written to {path}" in done.stdout
    split = "test" if "test" in options else "valid"
    scored = len(corpus.split(split)) - 1 if "segment" not in options else len(corpus.valid) // 4 * 4 - 4
    assert record["tokens"] == scored and record["split"] == split
    assert {"commit", "hardware", "versions", "wall_s", "tokens_per_s", "checkpoint", "step"} <= record.keys()
    how = record["protocol"]
    assert how["name"] == options[1]
    if mixer == "xl":
        assert (how["segment"], how["mem_len"], how["clamp_len"]) in {(1, 15, 12), (24, 24, 9)}
        assert record["state_size"] == 2 * (how["mem_len"] + how["segment"]) * 2 * 16


def test_the_protocol_of_segments_gives_the_number_of_training(runs):
    best = min(value for _, value in losses(runs / "delta", "valid", "ppl"))
    assert run("eval", "lm", runs / "delta").exit_code == 0
    (path,) = (runs / "delta" / "eval").glob("*batch4-best.json")
    assert json.loads(path.read_text())["ppl"] == pytest.approx(best, rel=1e-5)


def test_a_stopped_evaluation_leaves_nothing(runs, monkeypatch):
    def stopped(model, stream, how, report):
        report(1, 10)
        raise KeyboardInterrupt

    monkeypatch.setattr(protocols, "measure", stopped)
    done = run("eval", "lm", runs / "delta", "--segment", "3")
    assert done.exit_code == 130 and "nothing was written" in done.stderr
    assert not list((runs / "delta").glob("eval/*L3*"))


def test_an_evaluation_survives_a_reader_that_has_enough(runs, closed_stdout):
    assert run("eval", "lm", runs / "delta", "--segment", "5").exit_code == 1
    (path,) = (runs / "delta").glob("eval/*L5*")
    assert json.loads(path.read_text())["ppl"] > 1


def test_a_moved_corpus_is_asked_for(corpus, runs, tmp_path):
    shutil.copytree(runs / "delta", tmp_path / "run")
    shutil.copytree(corpus.folder, tmp_path / "corpus")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["about"]["data"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    done = run("eval", "lm", tmp_path / "run")
    assert done.exit_code == 2 and "gone, which does not exist" in done.stderr
    assert run("eval", "lm", tmp_path / "run", "--data", tmp_path / "corpus").exit_code == 0
    assert run("generate", tmp_path / "run", "--tokens", "3").exit_code == 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate(runs, mixer):
    arguments = ("generate", runs / mixer, "--prompt", "w1 w4 flurb", "--tokens", "12", "--top-k", "5", "--seed", "3")
    first, again, other = run(*arguments), run(*arguments), run(*arguments[:-1], "4")
    assert first.exit_code == 0, first.output
    assert first.stdout == again.stdout != other.stdout
    assert first.stdout.startswith("w1 w4 <unk>")
    assert len(first.stdout.replace("\n", " <eos> ").split()) == 3 + 12 + 1
    assert "read as <unk>: 'flurb'" in first.stderr
    assert ("does not stream" in first.stderr) == (mixer in ("transformer", "performer"))
    greedy = [run("generate", runs / mixer, "--temperature", "0", "--tokens", "5", "--seed", n).stdout for n in (1, 2)]
    assert greedy[0] == greedy[1]


FILE = __file__
TRAIN, RUN = ("train", "lm", "--data", "CORPUS", "--out", "OUT"), "RUNS/delta"
WRONG = [
    ((*TRAIN, "--preset", "tinny"), "did you mean 'tiny'"),
    ((*TRAIN, "--preset", "tiny", "--mixer", "transfomer"), "did you mean 'transformer'"),
    ((*TRAIN, "--preset", "tiny", "--rule", "dleta"), "did you mean 'delta'"),
    ((*TRAIN, "--preset", "tiny", "--precision", "bf16-mix"), "did you mean 'bf16-mixed'"),
    ((*TRAIN, "--preset", "tiny", "--precision", "fp16"), "known: fp32, bf16, 32-true, bf16-mixed, bf16-true, 64-true"),
    ((*TRAIN, "--preset", "tiny", "--set", "precision=fp16"), "known: fp32, bf16, 32-true,"),
    ((*TRAIN, "--preset", "tiny", "--seed", "1" * 23), f"--seed takes whole numbers up to {2**63 - 1}, got 111"),
    ((*TRAIN, "--preset", "tiny", "--set", f"seed={'1' * 23}"), "--seed takes whole numbers"),
    ((*TRAIN, "--preset", "tiny", "--strategy", "dpp"), "did you mean 'ddp'"),
    ((*TRAIN, "--preset", "tiny", "--set", "d_modle=3"), "did you mean 'd_model'"),
    ((*TRAIN, "--preset", "tiny", "--set", "mixer=delta"), "mixer cannot be set: it has its own option"),
    ((*TRAIN, "--preset", "tiny", "--set", "d_model"), "FIELD=VALUE"),
    ((*TRAIN, "--preset", "tiny", "--set", "d_model=wide"), "d_model takes int, got 'wide'"),
    ((*TRAIN, "--preset", "tiny", "--set", "cutoffs=[1,true]"), "cutoffs takes"),
    ((*TRAIN, "--preset", "tiny", "--set", "betas=[0.9]"), "betas takes"),
    ((*TRAIN, "--preset", "tiny", "--steps", "5", "--set", "steps=6"), "steps is given twice"),
    ((*TRAIN, "--preset", "tiny", "--steps", "0"), "steps must be above 0"),
    ((*TRAIN, "--preset", "tiny", "--nu", "2"), "--nu is for mixer 'dpfp'; mixer 'delta' has feature map 'elu'"),
    ((*TRAIN, "--preset", "tiny", "--mixer", "xl", "--features", "2"), "has no feature map"),
    ((*TRAIN, "--preset", "tiny", "--mixer", "transformer", "--context", "carried"), "limited context works for all"),
    ((*TRAIN, "--preset", "tiny", "--devices", "two"), "--devices must be a number"),
    ((*TRAIN, "--preset", "tiny", "--minutes", "0"), "--minutes must be above 0"),
    ((*TRAIN[:3], "OUT/none", "--preset", "tiny"), "`fastweights data KIND --out` writes one"),
    (("train", "lm", "--preset", "tiny", "--data", FILE), f"{FILE}, which is a file where a folder is wanted"),
    (
        ("eval", "lm", RUN, "--data", FILE),
        "a file where a folder is wanted; `fastweights data KIND --out` writes one",
    ),
    (("generate", RUN, "--data", FILE), "is a file where a folder is wanted"),
    (("eval", "lm", FILE), f"{FILE} is a file, and a run is a folder"),
    (("generate", RUN, "--seed", "1" * 23), "--seed takes whole numbers"),
    (("eval", "lm", "OUT/none"), "`fastweights train lm --out"),
    (("eval", "lm", RUN, "--split", "train"), "unknown split 'train'"),
    (("eval", "lm", RUN, "--protocol", "slide"), "did you mean 'sliding'"),
    (("eval", "lm", RUN, "--checkpoint", "bets"), "did you mean 'best'"),
    (("eval", "lm", RUN, "--mem-len", "4"), "memory of Transformer-XL"),
    (("eval", "lm", RUN, "--device", "abacus"), "use auto, cpu, cuda"),
    (("eval", "lm", "RUNS/transformer", "--protocol", "carried"), "cannot be carried"),
    (("eval", "lm", RUN, "--protocol", "sliding", "--stride", "999"), "would leave out tokens"),
    (("generate", "OUT/none"), "`fastweights train lm --out"),
    (("generate", RUN, "--tokens", "0"), "--tokens must be at least 1"),
    (("generate", RUN, "--top-p", "2"), "top_p must be"),
    (("generate", RUN, "--temperature", "-1"), "temperature must be"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_input_is_named(corpus, runs, tmp_path, arguments, message):
    places = {"CORPUS": str(corpus.folder), "OUT": str(tmp_path / "out"), "RUNS": str(runs)}
    for name, place in places.items():
        arguments = [part.replace(name, place) for part in arguments]
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert "Error: " in done.stderr and message in done.stderr
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("command", [["eval", "lm"], ["generate"]])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_an_error(runs, tmp_path, command, value):
    spoil(runs / "delta", tmp_path / "run", value)
    done = run(*command, tmp_path / "run")
    assert done.exit_code == 2 and done.stdout == ""
    assert "is not finite" in done.stderr and "--checkpoint last" in done.stderr and "--lr" in done.stderr
    assert not list((tmp_path / "run").glob("eval/*best*"))
    assert run(*command, tmp_path / "run", "--checkpoint", "last").exit_code == 0


def test_a_loss_that_is_not_finite_is_an_error(runs, tmp_path):
    """Weights that are finite each, and too large together."""
    spoil(runs / "delta", tmp_path / "run", 3e38)
    done = run("eval", "lm", tmp_path / "run")
    assert done.exit_code == 2 and done.stdout == "" and "has no perplexity" in done.stderr
    assert not list((tmp_path / "run").glob("eval/*best*"))


def test_eval_as_json(runs):
    done = run("eval", "lm", runs / "delta", "--segment", "7", "--json")
    (path,) = (runs / "delta" / "eval").glob("*L7*")
    assert done.stdout == path.read_text() and json.loads(done.stdout)["ppl"] > 1
    assert f"Written to {path}" in done.stderr and "scoring" in done.stderr


def test_a_slow_evaluation_shows_that_it_lives(monkeypatch, capsys):
    monkeypatch.setattr(results, "SILENCE", 0.0)
    with results.measuring("tokens") as report:
        for done in range(1, 1001):
            report(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 1,000 tokens" and len(lines) == 11


def test_a_long_evaluation_says_how_long(monkeypatch, capsys):
    monkeypatch.setattr(results, "SILENCE", 0.0)
    ticks = iter(range(0, 100, 3))
    monkeypatch.setattr(results.time, "monotonic", lambda: float(next(ticks)))
    with results.measuring("tokens", faster="; --stride 8 is faster") as report:
        report(5, 100)
        report(6, 100)
    assert capsys.readouterr().err == "5 of 100 tokens; about 1 min 00 s in all; --stride 8 is faster\n"


def test_damaged_weights_are_reported(runs, tmp_path):
    shutil.copytree(runs / "delta", tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("*/weights.safetensors"):
        file.write_bytes(b"junk")
    done = run("eval", "lm", tmp_path / "run")
    assert done.exit_code == 2 and "move it away to use the last one" in done.stderr


def test_divergence_is_reported(corpus, tmp_path):
    done = train_lm(corpus, tmp_path, "--warmup", "0", lr=1e30)
    assert done.exit_code == 1 and "is not finite" in done.stderr


def test_a_newcomer_needs_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = as_options({"d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8, "tensorboard": False})
    done = run("train", "lm", "--preset", "tiny", "--steps", "2", "--batch", "2", *sizes)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "data" / "embedded" / "manifest.json").exists()
    assert "runs/tiny-delta at step 2 (finished)" in done.stdout
    assert run("generate", "runs/tiny-delta", "--prompt", "The", "--tokens", "2").stdout.startswith("The ")


def test_the_default_model_streams(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = as_options({"d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8, "tensorboard": False, "eval_batch": 400})
    done = run("train", "lm", "--steps", "1", "--batch", "2", *sizes)
    assert done.exit_code == 0 and "runs/quick-delta at step 1 (finished)" in done.stdout
    assert "pieces of embedded, in batches of 2 segments of 64, context carried" in done.stderr
    text = run("generate", "runs/quick-delta", "--prompt", "The  list", "--tokens", "3")
    assert text.stdout.startswith("The  list") and "tokens are kept as a state of" in text.stderr


@pytest.mark.parametrize(
    ("command", "preset", "field"), [("lm", "small-fast", "segment"), ("mt", "base", "max_tokens")]
)
def test_presets_and_fields_are_listed(command, preset, field):
    done = run("train", command, "--list")
    assert done.exit_code == 0 and "Presets:\n  quick " in done.stdout
    assert f"\n  {preset} " in done.stdout and f"\n  {field} " in done.stdout and "clip" in done.stdout


def test_help_does_not_wait_for_torch():
    code = """
import sys
from fastweights.cli import app
for arguments in (["--help"], ["train", "--help"], ["eval"], ["bench", "-h"], ["trian"]):
    try:
        app(arguments)
    except SystemExit:
        assert not {"torch", "numpy", "matplotlib", "rich.progress"} & set(sys.modules), arguments
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_text_comes_word_by_word_and_a_closed_pipe_is_no_error(runs):
    code = "import sys; from fastweights.cli import app; sys.argv[0] = 'fastweights'; app()"
    command = [sys.executable, "-c", code, "generate", str(runs / "delta"), "--tokens", "100000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment, cwd=Path(__file__).parents[1]) as process:
        begin = time.monotonic()
        assert process.stdout.read(40).strip()
        process.stdout.close()
        assert process.wait(60) == 0 and "Traceback" not in process.stderr.read()
        assert time.monotonic() - begin < 60


def test_bytes_are_a_vocabulary_too(tmp_path):
    (tmp_path / "enwik8").write_bytes("Grüße, 東京! ".encode() * 400)
    prepare("enwik8", tmp_path / "enwik8", tmp_path / "corpus", allow_other=True)
    assert train_lm(Corpus.load(tmp_path / "corpus"), tmp_path / "run").exit_code == 0
    assert "bits per byte" in run("eval", "lm", tmp_path / "run", "--protocol", "sliding").stdout
    done = run("generate", tmp_path / "run", "--prompt", "Grü", "--tokens", "6")
    assert done.exit_code == 0 and done.stdout.startswith("Grü")
