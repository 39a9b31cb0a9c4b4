"""From aligned files to a corpus on disk: every pair is there, as it was."""

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fastweights.commands.data import data
from fastweights.data.manifest import DataError, sets
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.data.registry import CORPORA
from fastweights.data.text.corpus import Corpus
from tests.data.corpora import REAL, write_wikitext
from tests.data.killed import killed
from tests.data.pair_files import sentences, write_parallel, write_set

app = typer.Typer()
app.command()(data)


@pytest.fixture
def files(tmp_path):
    return write_parallel(tmp_path / "files"), tmp_path / "files"


def pairs(split):
    """What the token numbers say, beside the texts."""
    decode, numbers = split.tokenizer.decode, range(len(split))
    coded = [(decode(split.source(n)), decode(split.target(n))) for n in numbers]
    texts = list(zip(split.sources, split.targets, strict=True))
    assert coded == texts
    return texts


def test_round_trip(files, tmp_path):
    splits, folder = files
    manifest, fresh = prepare("parallel", folder, tmp_path / "out", vocab=300)
    corpus = ParallelCorpus.load(tmp_path / "out", verify=True)
    assert fresh and manifest == corpus.manifest and manifest["name"] == "files" and not manifest["official"]
    assert corpus.manifest["languages"] == ["en", "de"]
    assert corpus.tokenizer.size == 300 and corpus.split("train").source(0).dtype == np.uint16
    for name, expected in splits.items():
        split = corpus.split(name)
        assert len(split) == len(expected) and pairs(split) == expected
        for side, read in (("source", split.source), ("target", split.target)):
            assert split.lengths(side).tolist() == [len(read(n)) for n in range(len(split))]
            assert manifest["splits"][name]["files"][side]["tokens"] == split.lengths(side).sum()
    with pytest.raises(IndexError, match="0 … 8"):
        corpus.split("test").source(9)
    assert not prepare("parallel", folder, tmp_path / "out", vocab=300).fresh
    with pytest.raises(DataError, match="was prepared with"):
        prepare("parallel", folder, tmp_path / "out", vocab=301)


def test_the_other_direction_and_no_test_set(tmp_path):
    splits = write_parallel(tmp_path / "files", test=False)
    prepare("parallel", tmp_path / "files", tmp_path / "out", source_language="de", target_language="en", vocab=300)
    corpus = ParallelCorpus.load(tmp_path / "out")
    assert pairs(corpus.split("valid")) == [pair[::-1] for pair in splits["valid"]]
    with pytest.raises(ValueError, match="unknown split 'test'"):
        corpus.split("test")


@pytest.mark.parametrize(("suffix", "open_"), [(".gz", gzip.open), (".xz", lzma.open), (".bz2", bz2.open)])
def test_packed_files(tmp_path, suffix, open_):
    splits = write_parallel(tmp_path / "files")
    for path in list((tmp_path / "files").glob("train.*")):
        path.unlink()
    write_set(tmp_path / "files", "train", splits["train"], suffix=suffix, open_=open_)
    prepare("parallel", tmp_path / "files", tmp_path / "out", vocab=300)
    assert pairs(ParallelCorpus.load(tmp_path / "out").split("train")) == splits["train"]
    path = tmp_path / "files" / f"train.de{suffix}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train\.de.* is damaged or cut short"):
        prepare("parallel", tmp_path / "files", tmp_path / "new", vocab=300)


def sgm(folder, name, lines):
    segments = "\n".join(f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(lines, 1))
    text = f'<srcset setid="x">\n<doc docid="a">\n<p>\n{segments}\n</p>\n</doc>\n</srcset>\n'
    (folder / name).write_text(text, encoding="utf-8")


def test_wmt_names(tmp_path):
    """Several training sets; newstest2013 validates, newstest2014 tests; of two files for a language the one meant."""
    folder = tmp_path / "wmt"
    train = [sentences(0, 50), sentences(1, 40)]
    write_set(folder, "commoncrawl.de-en", train[0])
    write_set(folder, "europarl-v7.de-en", train[1])
    write_set(folder, "newstest2012", sentences(5, 4))
    write_set(folder, "europarl-v7.cs-en", sentences(6, 4), languages=("en", "cs"))
    sgm(folder, "newstest2014-fren-ref.en.sgm", ["of another pair"])
    valid, test = sentences(2, 7), sentences(3, 8)
    sgm(folder, "newstest2013-src.en.sgm", [f"{source} &amp; more" for source, _ in valid])
    sgm(folder, "newstest2013-ref.de.sgm", [target for _, target in valid])
    for side, language in enumerate(("en", "de")):
        sgm(folder, f"newstest2014-deen-{('src', 'ref')[side]}.{language}.sgm", [pair[side] for pair in test])
        sgm(folder, f"newstest2014-deen-{('ref', 'src')[side]}.{language}.sgm", ["not this"] * 8)
    manifest, _ = prepare("wmt14", folder, tmp_path / "out", vocab=300, allow_other=True)
    corpus = ParallelCorpus.load(tmp_path / "out")
    assert pairs(corpus.split("train")) == train[0] + train[1]
    assert pairs(corpus.split("valid")) == [(f"{source} & more", target) for source, target in valid]
    assert pairs(corpus.split("test")) == test
    assert manifest["official"] is False and manifest["name"] == "wmt"
    with pytest.raises(
        DataError, match=r"not WMT14 en-de, .*: 90 pairs in train, not 3,900,000 to 4,600,000; 7 pairs in"
    ):
        prepare("wmt14", folder, tmp_path / "new", vocab=300)


def test_sets_named_by_options(tmp_path):
    """By path without a language, by one of its files, or by name in the folder; the rest stays for training."""
    folder, other = tmp_path / "files", tmp_path / "other"
    splits = write_parallel(folder)
    write_set(folder, "test_2018", sentences(7, 5))
    write_set(other, "news", sentences(8, 6))
    with pytest.raises(DataError, match=r"has test\.en, test_2018\.en for test; name one of them with --test"):
        prepare("parallel", folder, tmp_path / "out", vocab=300)
    prepare("parallel", folder, tmp_path / "out", vocab=300, valid=other / "news", test=Path("test_2018"))
    corpus = ParallelCorpus.load(tmp_path / "out")
    assert pairs(corpus.split("valid")) == sentences(8, 6) and pairs(corpus.split("test")) == sentences(7, 5)
    assert sets(corpus.manifest) == {"valid": "news", "test": "test_2018"}
    prepare(
        "parallel", folder, tmp_path / "out", vocab=300, valid=other / "news.de", test=folder / "test.en", force=True
    )
    corpus = ParallelCorpus.load(tmp_path / "out")
    assert pairs(corpus.split("valid")) == sentences(8, 6) and pairs(corpus.split("test")) == splits["test"]
    with pytest.raises(DataError, match=r"no files .*nowhere\.en"):
        prepare("parallel", folder, tmp_path / "new", vocab=300, valid=other / "nowhere")


def test_only_a_line_feed_ends_a_line(tmp_path):
    splits = write_parallel(tmp_path / "files")
    awkward = [("a\u2028b \x85 c\x0bd", "e\rf"), ("\ufeffg", "h")]
    write_set(tmp_path / "files", "train", awkward + splits["train"])
    write_set(tmp_path / "files", "test", awkward)
    for language in ("en", "de"):
        path = tmp_path / "files" / f"train.{language}"
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    prepare("parallel", tmp_path / "files", tmp_path / "out", vocab=300)
    corpus = ParallelCorpus.load(tmp_path / "out")
    assert pairs(corpus.split("train")) == awkward + splits["train"] and pairs(corpus.split("test")) == awkward


def test_pairs_with_an_empty_side_are_left_out_of_training(files, tmp_path):
    splits, folder = files
    write_set(folder, "train", [("only", ""), *splits["train"], ("", " nur "), ("", "")])
    manifest, _ = prepare("parallel", folder, tmp_path / "out", vocab=300)
    assert pairs(ParallelCorpus.load(tmp_path / "out").split("train")) == splits["train"]
    assert manifest["splits"]["train"]["left_out"] == 3


def test_fetched_from_the_hub(tmp_path, monkeypatch):
    splits, asked = {"train": sentences(0, 40), "validation": sentences(1, 4), "test": sentences(2, 5)}, []

    def load_dataset(*names):
        asked.append(names)
        return {
            name: [{"translation": {"de": f"{german}\n", "en": english}} for english, german in rows]
            for name, rows in splits.items()
        }

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    manifest, _ = prepare("wmt14", None, tmp_path / "out", vocab=300, allow_other=True)
    corpus = ParallelCorpus.load(tmp_path / "out", verify=True)
    assert asked == [("wmt/wmt14", "de-en")] and manifest["name"] == "wmt/wmt14 de-en"
    assert pairs(corpus.split("train")) == splits["train"] and pairs(corpus.split("valid")) == splits["validation"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if "train" in path.name) == [
        f"train.{language}.{kind}" for language in ("de", "en") for kind in ("bin", "starts")
    ]


def test_the_published_counts_give_the_name(files, tmp_path, monkeypatch):
    from dataclasses import replace

    row = CORPORA["wmt14"]
    monkeypatch.setitem(
        CORPORA, "wmt14", replace(row, official=row.official._replace(train=(50, 60), valid=(9, 9), test=(9, 9)))
    )
    manifest, _ = prepare("wmt14", files[1], tmp_path / "out", vocab=300)
    assert manifest["official"] is True and manifest["name"] == "WMT14 en-de"


def test_streams_and_pairs_are_not_taken_for_each_other(files, tmp_path):
    write_wikitext(tmp_path / "text")
    prepare("wikitext2", tmp_path / "text", tmp_path / "stream", allow_other=True)
    prepare("parallel", files[1], tmp_path / "pairs", vocab=300)
    with pytest.raises(DataError, match=r"'wikitext2' in .* is text for language models, not sentence pairs"):
        ParallelCorpus.load(tmp_path / "stream")
    with pytest.raises(DataError, match=r"'parallel' in .* is sentence pairs for translation, not text"):
        Corpus.load(tmp_path / "pairs")


def test_fingerprint(files, tmp_path):
    _, folder = files
    for name, vocab in (("a", 300), ("b", 300), ("c", 301)):
        prepare("parallel", folder, tmp_path / name, vocab=vocab)
    a, b, c = (ParallelCorpus.load(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


def test_damage_is_found(files, tmp_path):
    out = tmp_path / "out"
    prepare("parallel", files[1], out, vocab=300)
    for name in ("train.en.bin", "valid.de.starts", "test.de", "tokenizer.json"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-2])
        with pytest.raises(DataError, match=f"damaged: {name} has"):
            ParallelCorpus.load(out)
        (out / name).write_bytes(b"xy" + content[2:])
        with pytest.raises(DataError, match=f"{name} was changed"):
            ParallelCorpus.load(out, verify=True)
        assert prepare("parallel", files[1], out, vocab=300, force=True).fresh
    entry = json.loads((out / "manifest.json").read_text())
    entry["splits"]["train"]["pairs"] += 1
    (out / "manifest.json").write_text(json.dumps(entry))
    with pytest.raises(DataError, match=r"train\.en\.starts does not fit the manifest"):
        ParallelCorpus.load(out)


def test_killed_at_every_stage(files, tmp_path):
    """Nothing, and in the end the corpus; never a part of it."""
    out, seen, code = tmp_path / "out", [], 9
    with killed("parallel", files[1], out, vocab=300) as attempt:
        while code:
            code = attempt(len(seen) * 4)
            assert code in (0, 9)
            try:
                seen.append(len(ParallelCorpus.load(out, verify=True).split("train")))
            except DataError:
                seen.append(None)
    assert len(seen) > 4 and seen == [None] * (len(seen) - 1) + [60]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])


def test_the_command(files, tmp_path):
    splits, folder = files
    write_set(folder, "train", [*splits["train"], ("", "leer")])
    result = run("parallel", "--source", folder, "--out", tmp_path / "out", "--vocab", 300)
    assert result.exit_code == 0, result.output
    assert "files: 300 pieces" in result.stdout and "60 pairs" in result.stdout
    assert "1 left out as a side is empty" in result.stdout
    assert [stage for stage in result.stderr.splitlines() if "train" in stage] == ["reading train", "writing train"]
    refused = run("parallel", "--source", folder, "--out", tmp_path / "new", "--pairs", 3)
    assert refused.exit_code == 2 and "has no --pairs; those that have it: numbers" in refused.stderr


@pytest.mark.skipif(not (REAL / "multi30k").is_dir(), reason=f"multi30k is not in {REAL}")
def test_multi30k(tmp_path):
    prepare("parallel", REAL / "multi30k", tmp_path, test=Path("test_2016_flickr"), vocab=8_000)
    corpus = ParallelCorpus.load(tmp_path)
    assert [len(corpus.split(split)) for split in ("train", "valid", "test")] == [29_000, 1_014, 1_000]
    for split, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        lines = [(REAL / "multi30k" / f"{name}.{language}").read_text().split("\n")[:-1] for language in ("en", "de")]
        assert pairs(corpus.split(split)) == [(a.strip(), b.strip()) for a, b in zip(*lines, strict=True)]


@pytest.mark.skipif(not (REAL / "newstest").is_dir(), reason=f"newstest is not in {REAL}")
def test_newstest_needs_something_to_train_on(tmp_path):
    with pytest.raises(DataError, match="nothing for train, it holds newstest2013, newstest2014"):
        prepare("parallel", REAL / "newstest", tmp_path)
