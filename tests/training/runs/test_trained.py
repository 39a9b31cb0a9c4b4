"""`fastweights.load` and `fastweights export run`: a trained model in Python gives what the command line gives."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

import fastweights as fw
from fastweights.cli import app
from fastweights.data.text.corpus import Corpus
from fastweights.training.engine.loop import train
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import find_run, keep_tokenizer
from fastweights.training.tasks.translation import assemble_translation
from tests.training.small_pairs import SMALL as SMALL_PAIRS
from tests.training.small_pairs import small_pairs
from tests.training.small_text import run as train_language
from tests.training.small_text import small_corpus
from tests.training.tiny import quiet


def run(*arguments, input=None):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(part) for part in arguments], input=input)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A language model that streams and one that does not."""
    folder = tmp_path_factory.mktemp("language")
    corpus = small_corpus(folder)
    for name, options in (("carried", {"context": "carried"}), ("limited", {})):
        train_language(corpus, folder / name, **options)
        keep_tokenizer(folder / name, corpus.tokenizer)
    return folder


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    corpus = small_pairs(folder)
    task, config = assemble_translation(corpus, **{"preset": "tiny", "attention": "linear", **SMALL_PAIRS})
    train(task, config, folder / "run", console=quiet())
    keep_tokenizer(folder / "run", corpus.tokenizer)
    return folder / "run", corpus


@pytest.mark.parametrize("name", ["carried", "limited"])
def test_generate_is_the_command(language, name):
    options = {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 4}
    text = fw.load(language / name).generate("w3 w10", tokens=12, **options)
    assert text.startswith("w3 w10 ") and len(text.split()) >= 12
    arguments = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
    done = run("generate", language / name, "--prompt", "w3 w10", "--tokens", 12, *arguments)
    assert done.exit_code == 0 and done.stdout == f"{text}\n"
    assert text != fw.load(language / name).generate("w3 w10", tokens=12, **options | {"seed": 5})


def test_a_stream_reads_text_in_any_parts(language):
    lm = fw.load(str(language / "carried"))
    text = "w3 w10 w10\nw4 w13\nw19 w16"
    whole = lm.stream().feed(text)
    stream = lm.stream()
    for part in ("w3 w10", "w10\n", "w4 w13\n"):
        stream.feed(part)
    other = stream.fork()
    numbers = lm.tokenizer.encode("w19 w16")
    for log_probs in (stream.feed("w19 w16"), other.feed("w19 w16")):
        torch.testing.assert_close(log_probs, whole)
    assert stream.position == len(lm.tokenizer.encode(text)) and stream.nbytes == lm.stream().nbytes + other.nbytes
    hidden, _ = lm.model(torch.tensor([lm.tokenizer.encode(text)]))
    torch.testing.assert_close(lm.model.softmax.log_prob(hidden[0, -1]), whole)
    with pytest.raises(TypeError, match="takes token numbers, got the text 'w19 w16'"):
        fw.Stream(lm.model).feed("w19 w16")
    torch.testing.assert_close(fw.Stream(lm.model).feed(numbers), lm.stream().feed("w19 w16"))
    with pytest.raises(ValueError, match="the text is empty"):
        stream.feed("")


def test_a_text_is_scored_as_a_split_of_the_same_words(language, tmp_path):
    def score(*arguments):
        done = run("eval", "lm", language / "carried", *arguments, "--protocol", "carried", "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    split = score("--data", language / "corpus", "--split", "test")
    lm, text = fw.load(language / "carried"), tmp_path / "mine.txt"
    text.write_text(lm.tokenizer.decode(Corpus.load(language / "corpus").test.tokens.tolist()))
    alone = score("--text", text)
    same = ("loss", "tokens", "bits_per_character", "bits_per_byte")
    assert {name: alone[name] for name in same} == {name: split[name] for name in same}
    assert alone["corpus"] == "mine.txt"
    assert list((language / "carried" / "eval").glob("mine-carried*.json"))


def test_errors_of_texts_to_score(language, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("w1")
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    for arguments, message in (
        (["demo"], "Error: demo does not come with the corpus it was trained on; say with --data where that is, or"),
        ([language / "carried", "--text", "one.txt"], "one.txt has 1 tokens, and at least 2 are needed"),
        ([language / "carried", "--text", "latin.txt"], "latin.txt is not text in UTF-8: invalid"),
        ([language / "carried", "--text", "none.txt"], "none.txt cannot be read: No such file"),
        ([language / "carried", "--text", "one.txt", "--split", "test"], "in place of a split, got --split test too"),
    ):
        done = run("eval", "lm", *arguments)
        assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.stderr


def test_translate_is_the_command(translation):
    folder, corpus = translation
    mt = fw.load(folder)
    lines = [*corpus.split("valid").sources[:3], ""]
    done = run("translate", folder, "--beam", 2, input="".join(f"{line}\n" for line in lines))
    assert done.exit_code == 0 and done.stdout.split("\n")[:4] == mt.translate(lines, beam=2)
    with pytest.raises(TypeError, match="a list of lines, got one text; for one line give"):
        mt.translate("two, three")


def test_an_export_is_a_small_run(language, translation, tmp_path):
    assert run("eval", "lm", language / "carried", "--data", language / "corpus").exit_code == 0
    (language / "carried" / "eval" / "worst.json").write_text('{"ppl": "inf"}')
    for name, source in {"lm": language / "carried", "mt": translation[0]}.items():
        done = run(
            "export", "run", source, "--out", tmp_path / name, "--precision", "bf16", "--note", "Words of no language."
        )
        assert done.exit_code == 0, done.output
        exported, original = fw.load(tmp_path / name), fw.load(source)
        assert exported.checkpoint.scores == original.checkpoint.scores
        state = exported.model.state_dict()
        for key, weight in original.model.state_dict().items():
            assert state[key].dtype == torch.float32 and torch.equal(state[key], weight.bfloat16().float())
        card = (tmp_path / name / "README.md").read_text()
        assert "Words of no language." in card and f"{original.model.n_parameters:,} parameters, bfloat16" in card
        assert "data" not in json.loads((tmp_path / name / "config.json").read_text())["about"]
    (result,) = (tmp_path / "lm" / "eval").glob("valid-segment*.json")
    card = (tmp_path / "lm" / "README.md").read_text()
    assert f"ppl {json.loads(result.read_text())['ppl']:.4g}" in card and "| eval/worst.json | ppl inf |" in card
    assert run("generate", tmp_path / "lm", "--prompt", "w3", "--tokens", 3).stdout.startswith("w3 ")
    again = run("export", "run", language / "carried", "--out", tmp_path / "lm")
    assert again.exit_code == 2 and "is not empty" in again.stderr


def test_the_demo_speaks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lm = fw.load("demo")
    text = lm.generate("The river", tokens=30, temperature=0.7)
    done = run("generate", "demo", "--prompt", "The river", "--tokens", 30, "--temperature", 0.7)
    assert done.stdout == f"{text}\n" and "tokens are kept as a state of" in done.stderr
    sentence = lm.tokenizer.encode("The film was released in the United States in 1999.")
    stream, cost = lm.stream(), 0.0
    for before, after in pairwise(sentence):
        cost -= float(stream.feed([before])[after])
    # A model that knew nothing would need log(4,096) = 8.3 nats a piece.
    assert cost / (len(sentence) - 1) < 3.0


def test_a_run_of_ones_own_may_be_called_demo(language, tmp_path, monkeypatch):
    shutil.copytree(language / "carried", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert fw.load("demo").model.config.d_model == 16
    assert run("generate", "demo", "--prompt", "w3", "--tokens", 2).stdout.startswith("w3 w")


def test_the_demo_is_small_and_says_what_it_is():
    folder = find_run("demo")
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 6e6
    card = (folder / "README.md").read_text()
    assert "CC BY-SA 3.0" in card and "fastweights train lm --data wikipedia" in card


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"nowhere does not exist; .*; 'demo' names the language model"):
        fw.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"task": {"name": "retrieval"}}')
    with pytest.raises(RunError, match="holds a run of the task 'retrieval', not of a language model"):
        fw.load(tmp_path)


def test_loading_by_name_is_lazy():
    code = "import sys, fastweights; assert 'load' in dir(fastweights) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
