"""`--tokens`: a text in words, byte pairs, characters or bytes, and numbers that can be compared between them."""

import bz2
import gzip
import json
import lzma

import pytest
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.data.manifest import DataError
from fastweights.data.prepare import prepare
from fastweights.data.text import embedded
from fastweights.data.text.corpus import Corpus
from fastweights.data.text.documents import mark_documents
from tests.data.corpora import SPLITS
from tests.training.small_text import SMALL, as_options

KINDS = {"words": {}, "bpe": {"vocabulary_size": 300}, "characters": {}, "bytes": {}}
FILES = {"words": "vocabulary.txt", "bpe": "tokenizer.json"}
FILES |= {"characters": "characters.json", "bytes": "vocabulary.json"}
EXACT = [kind for kind in KINDS if kind != "words"]
# Tabs, blank lines, carriage returns, and signs of which the last tenth alone has the smile.
ENDS = ("\r\n", "\n", "\n\n")
ROWS = [f"\tThe  naïve cat number {n} sees 東京.{ENDS[n % 3]}" for n in range(90)]
TEXT = "".join([*ROWS, *(f"And {n} 🙂 more\n" for n in range(14))])


@pytest.fixture
def source(tmp_path):
    (tmp_path / "some file.txt").write_bytes(TEXT.encode())
    return tmp_path / "some file.txt"


def text_of(corpus):
    return "".join(corpus.tokenizer.decode(corpus.split(split).tokens.tolist()) for split in SPLITS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_every_kind_of_tokens(source, tmp_path, kind):
    out = tmp_path / "mine"
    manifest, _ = prepare("text", source, out, tokens=kind, **KINDS[kind])
    corpus = Corpus.load(out, verify=True)
    assert (manifest["name"], manifest["source"]["name"]) == ("mine", "some file.txt")
    assert corpus.tokenizer.kind == kind and (out / FILES[kind]).is_file()
    assert manifest["vocabulary"] | {"kind": kind, "size": corpus.tokenizer.size} == manifest["vocabulary"]
    if kind == "words":
        assert text_of(corpus).split() == [word if word in corpus.tokenizer else "<unk>" for word in TEXT.split()]
    else:
        assert text_of(corpus) == TEXT
    counts = manifest["splits"].values()
    assert sum(split["text_bytes"] for split in counts) == len(TEXT.encode())
    assert sum(split["characters"] for split in counts) == len(TEXT)
    assert not prepare("text", source, out, tokens=kind, **KINDS[kind]).fresh
    with pytest.raises(DataError, match=r"was prepared with .*choose another --out"):
        prepare("text", source, out, tokens="bytes" if kind == "words" else "words")


@pytest.mark.parametrize("library", [gzip, lzma, bz2], ids=lambda library: library.__name__)
def test_packed_files_are_read_as_they_are_packed(source, tmp_path, library):
    packed = source.with_name(source.name + {gzip: ".gz", lzma: ".xz", bz2: ".bz2"}[library])
    packed.write_bytes(library.compress(source.read_bytes()))
    for name, path in (("plain", source), ("packed", packed)):
        prepare("text", path, tmp_path / name, tokens="characters")
    plain, unpacked = Corpus.load(tmp_path / "plain"), Corpus.load(tmp_path / "packed")
    assert plain.fingerprint == unpacked.fingerprint and plain.manifest["splits"] == unpacked.manifest["splits"]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"{packed.name} is damaged or cut short"):
        prepare("text", packed, tmp_path / "cut", tokens="characters")


def test_the_vocabulary_is_that_of_the_training_text(source, tmp_path):
    prepare("text", source, tmp_path / "out", tokens="characters")
    corpus = Corpus.load(tmp_path / "out")
    assert corpus.tokenizer.characters == "ï京東"
    counted = corpus.manifest["splits"]
    assert counted["train"]["tokens"] == counted["train"]["characters"]
    # Each smile of the other splits is spelled in four bytes.
    smiles = corpus.tokenizer.decode(corpus.test.tokens.tolist()).count("🙂")
    assert counted["test"]["tokens"] == counted["test"]["characters"] + 3 * smiles > counted["test"]["characters"]


@pytest.mark.parametrize("kind", KINDS)
def test_paragraphs_begin_at_the_same_places(source, tmp_path, kind):
    prepare("text", source, tmp_path / "out", tokens=kind, **KINDS[kind])
    corpus = Corpus.load(tmp_path / "out")
    starts = mark_documents(corpus.train, corpus.tokenizer, "paragraphs").starts.nonzero().flatten()
    text = corpus.tokenizer.decode(corpus.train.tokens.tolist())
    assert len(starts) == text.rstrip().count("\n\n") > 20
    for start in starts[:3].tolist():
        before = corpus.tokenizer.decode(corpus.train.tokens[:start].tolist())
        assert before.endswith("\n\n") and text.startswith(before)


@pytest.mark.parametrize("kind", EXACT)
def test_the_documentation_of_python(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "MODULES", ["json", "textwrap", "string", "shelve", "sched", "csv", "cmd", "bisect"])
    prepare("embedded", None, tmp_path / "words")
    prepare("embedded", None, tmp_path / kind, tokens=kind, **KINDS[kind])
    words, corpus = Corpus.load(tmp_path / "words"), Corpus.load(tmp_path / kind)
    assert "JSON (JavaScript Object Notation) <https://json.org> is a subset of" in text_of(corpus)
    for split in SPLITS:

        def titles(each, split=split):
            lines = each.tokenizer.decode(each.split(split).tokens.tolist()).split("\n")
            return sum(line.startswith("= ") and line.endswith(" =") for line in lines)

        assert titles(words) == titles(corpus) > 0


def test_corpora_of_the_first_version(source, tmp_path):
    out = tmp_path / "out"
    prepare("text", source, out, max_words=9)
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["options"] = {"min_count": 1, "max_words": 9, "valid": None, "test": None}
    for split in manifest["splits"].values():
        del split["text_bytes"], split["characters"]
    path.write_text(json.dumps(manifest))
    assert Corpus.load(out, verify=True).tokenizer.size == 9
    assert not prepare("text", source, out, vocabulary_size=9).fresh
    with pytest.raises(DataError, match="was prepared with"):
        prepare("text", source, out, tokens="characters", vocabulary_size=300)


def refused(source, tmp_path, message, **options):
    with pytest.raises(ValueError, match=message):
        prepare("text", source, tmp_path / "out", **options)


def test_what_is_refused(source, tmp_path):
    refused(source, tmp_path, "unknown kind of tokens 'character'; did you mean 'characters'", tokens="character")
    refused(source, tmp_path, "--min-count 2 has no meaning with --tokens bytes", tokens="bytes", min_count=2)
    refused(source, tmp_path, "--vocabulary-size must be at least 2, got 1", vocabulary_size=1)
    for kind in ("bpe", "characters"):
        refused(source, tmp_path, "--vocabulary-size must be at least 256, got 99", tokens=kind, vocabulary_size=99)
    with pytest.raises(DataError, match="'wikitext2' has no --tokens; those that have it: text, embedded"):
        prepare("wikitext2", source, tmp_path / "out", tokens="bpe")


def run(*arguments):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(part) for part in arguments])
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_text_to_a_model_that_writes(source, tmp_path, kind):
    options = [part for name, value in KINDS[kind].items() for part in (f"--{name.replace('_', '-')}", value)]
    out, folder = tmp_path / "mine", tmp_path / "run"
    prepared = run("data", "text", "--source", source, "--out", out, "--tokens", kind, *options)
    units = {"bpe": "pieces"}.get(kind, kind)
    assert f"mine: {Corpus.load(out).tokenizer.size:,} {units}" in prepared.stdout
    small = as_options({name: value for name, value in SMALL.items() if name not in ("steps", "lr", "seed")})
    train = ("train", "lm", "--preset", "tiny", "--positions", "none", "--data", out, "--out", folder)
    trained = run(*train, "--steps", 3, "--lr", 0.02, *small)
    assert f"{units} of mine" in trained.stderr
    done = run("eval", "lm", folder, "--split", "test", "--json")
    record, counts = json.loads(done.stdout), Corpus.load(out).manifest["splits"]["test"]
    bits = record["bits_per_token"] * counts["tokens"]
    assert record["bits_per_byte"] == pytest.approx(bits / counts["text_bytes"])
    assert record["bits_per_character"] == pytest.approx(bits / counts["characters"])
    shown = run("eval", "lm", folder, "--split", "test").stdout
    assert f"{record['bits_per_byte']:.4f} bits per byte" in shown
    out.rename(tmp_path / "gone")
    written = run("generate", folder, "--prompt", "The naïve 🙂", "--tokens", 5).stdout
    assert written.startswith("The naïve <unk>" if kind == "words" else "The naïve 🙂")
