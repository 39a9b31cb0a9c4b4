"""From official files to a corpus on disk: what is written is what a plain loop over lines gives."""

import hashlib
import json
import subprocess
import sys

import pytest

from fastweights.data import sources
from fastweights.data.manifest import sets
from fastweights.data.prepare import prepare
from fastweights.data.registry import CORPORA
from fastweights.data.text.corpus import Corpus
from tests.data.corpora import SPLITS, naive, write_wikitext, zipped


@pytest.fixture
def wikitext(tmp_path):
    return write_wikitext(tmp_path / "official"), tmp_path / "official"


def tokens(corpus):
    return {split: corpus.split(split).tokens.tolist() for split in SPLITS}


@pytest.mark.parametrize("block", [1 << 22, 7, 64])
@pytest.mark.parametrize("where", ["folder", "folder above", "zip"])
def test_wikitext_round_trip(wikitext, tmp_path, monkeypatch, where, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    texts, folder = wikitext
    places = {"folder": folder, "folder above": folder.parent}
    source = zipped(folder, tmp_path / "wikitext.zip") if where == "zip" else places[where]
    manifest, fresh = prepare("wikitext2", source, tmp_path / "out", allow_other=True)
    corpus = Corpus.load(tmp_path / "out", verify=True)
    words, expected = naive(texts)
    assert fresh and manifest == corpus.manifest
    assert corpus.tokenizer.words == tuple(words)
    assert tokens(corpus) == expected
    for split in SPLITS:
        assert corpus.tokenizer.decode(expected[split]).count("\n") == len(texts[split])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "test.bin",
        "train.bin",
        "valid.bin",
        "vocabulary.txt",
    ]


def test_the_manifest_says_what_was_read_and_written(wikitext, tmp_path):
    texts, folder = wikitext
    out = tmp_path / "out"
    prepare("wikitext103", folder, out, allow_other=True)
    manifest = json.loads((out / "manifest.json").read_text())
    words, expected = naive(texts)
    assert manifest["official"] is False and manifest["name"] == manifest["source"]["name"] == "official"
    assert manifest["vocabulary"]["size"] == len(words) and manifest["dtype"] == "uint16"
    for split in SPLITS:
        entry, known = manifest["splits"][split], set(words)
        outside = sum(word not in known for row in texts[split] for word in row.split())
        assert entry["tokens"] == len(expected[split]) and entry["out_of_vocabulary"] == outside
        assert entry["unknown"] == expected[split].count(words.index("<unk>"))
        assert entry["sha256"] == hashlib.sha256((out / f"{split}.bin").read_bytes()).hexdigest()
    assert manifest["splits"]["train"]["out_of_vocabulary"] == 0 < manifest["splits"]["valid"]["out_of_vocabulary"]
    read = {entry["name"]: entry for entry in manifest["source"]["files"]}
    assert sets(manifest) == {"valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
    content = (folder / "wiki.train.tokens").read_bytes()
    assert read["wiki.train.tokens"]["bytes"] == len(content)
    assert read["wiki.train.tokens"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_order_of_the_vocabulary(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" late b b \n\n a a c <unk> \n", encoding="utf-8")
    for split in ("valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text("A\xa0b\r\nnew\rlate", encoding="utf-8", newline="")
    prepare("wikitext2", folder, tmp_path / "out", allow_other=True)
    corpus = Corpus.load(tmp_path / "out")
    assert corpus.tokenizer.words == ("<eos>", "b", "a", "late", "c", "<unk>")
    assert corpus.tokenizer.decode(corpus.train.tokens.tolist()) == "late b b\n\na a c <unk>\n"
    # Any white space separates words and any line end ends a line, the last one's being understood; case matters.
    assert corpus.valid.tokens.tolist() == [5, 1, 0, 5, 0, 3, 0]


def test_large_vocabularies_take_four_bytes(tmp_path):
    texts = {"train": [" ".join(f"w{n}" for n in range(70_000))], "valid": ["w69999 w0"], "test": ["w65536 x"]}
    for split in SPLITS:
        (tmp_path / f"wiki.{split}.tokens").write_text(texts[split][0] + "\n")
    prepare("wikitext2", tmp_path, tmp_path / "out", allow_other=True)
    corpus = Corpus.load(tmp_path / "out")
    assert corpus.manifest["dtype"] == "uint32" and corpus.tokenizer.size == 70_002
    assert corpus.tokenizer.decode(corpus.test.tokens.tolist()) == "w65536 <unk>\n"
    assert corpus.valid.segments(1, 5).batch_at(0).targets.tolist() == [[2, 0]]


def test_a_finished_corpus_is_found(wikitext, tmp_path):
    folder, out = wikitext[1], tmp_path / "out"
    prepare("wikitext2", folder, out, allow_other=True)
    before = (out / "train.bin").stat().st_mtime_ns
    assert not prepare("wikitext2", folder, out, allow_other=True).fresh
    assert not prepare("wikitext2", tmp_path / "gone", out).fresh
    assert (out / "train.bin").stat().st_mtime_ns == before
    assert prepare("wikitext2", folder, out, allow_other=True, force=True).fresh
    (out / "valid.bin").write_bytes(b"cut")
    said = []
    assert prepare("wikitext2", folder, out, allow_other=True, report=lambda stage, _: said.append(stage)).fresh
    assert "valid.bin has 3 bytes" in said[0]


def test_enwik8(tmp_path):
    content = bytes(range(256)) * 4
    (tmp_path / "enwik8").write_bytes(content)
    out = tmp_path / "out"
    prepare("enwik8", tmp_path / "enwik8", out, allow_other=True)
    corpus = Corpus.load(out)
    found = tokens(corpus)
    assert bytes(found["train"] + found["valid"] + found["test"]) == content
    assert [len(found[split]) for split in SPLITS] == [921, 51, 52]
    assert corpus.tokenizer.size == 256 and corpus.manifest["official"] is False
    archive = zipped(_only(tmp_path / "enwik8", tmp_path / "alone"), tmp_path / "enwik8.zip")
    prepare("enwik8", archive, tmp_path / "again", allow_other=True)
    assert Corpus.load(tmp_path / "again").fingerprint == corpus.fingerprint


def _only(file, folder):
    folder.mkdir()
    (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_text_is_split_by_lines(tmp_path):
    rows = [f"line{n} common\n" for n in range(100)]
    (tmp_path / "all.txt").write_text("".join(rows))
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, part in (("a", rows[:33]), ("b", rows[33:92]), ("c", []), ("d", rows[92:])):
        (parts / f"{name}.txt").write_text("".join(part))
    for source in (tmp_path / "all.txt", parts):
        out = tmp_path / f"out-{source.name}"
        prepare("text", source, out)
        corpus = Corpus.load(out)
        assert [len(corpus.split(split)) for split in SPLITS] == [270, 15, 15]
        assert corpus.tokenizer.words[:4] == ("<eos>", "<unk>", "common", "line0")
        decoded = "".join(corpus.tokenizer.decode(corpus.split(split).tokens.tolist()) for split in SPLITS)
        assert decoded.split("\n")[:90] == [row.strip() for row in rows[:90]]
        assert decoded.split("\n")[90:100] == ["<unk> common"] * 10


@pytest.mark.parametrize("block", [1 << 22, 5])
def test_text_with_its_own_splits_and_limits(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "BLOCK", block)
    (tmp_path / "train").write_text("\ufeffa a a b b c <unk> one-very-long-line-of-a-file", encoding="utf-8")
    (tmp_path / "other").write_text("a d\nb")
    files = {"valid": tmp_path / "other", "test": tmp_path / "other"}
    for name, options, words in (
        ("count", {"min_count": 2}, ("<eos>", "<unk>", "a", "b")),
        ("size", {"max_words": 3}, ("<eos>", "<unk>", "a")),
        ("all", {}, ("<eos>", "a", "b", "c", "<unk>", "one-very-long-line-of-a-file")),
    ):
        prepare("text", tmp_path / "train", tmp_path / name, **files, **options)
        corpus = Corpus.load(tmp_path / name)
        assert corpus.tokenizer.words == words
    counted = json.loads((tmp_path / "count" / "manifest.json").read_text())["splits"]
    assert counted["train"] | {"tokens": 9, "unknown": 3, "out_of_vocabulary": 2} == counted["train"]
    assert counted["valid"] | {"tokens": 5, "unknown": 1, "out_of_vocabulary": 1} == counted["valid"]


def test_ids_give_what_their_text_gives(wikitext, tmp_path):
    np = pytest.importorskip("numpy")
    texts, folder = wikitext
    words, expected = naive(texts)
    (folder / "wiki.train.tokens").unlink()
    np.save(folder / "train.ids.u32.npy", np.array(expected["train"], dtype=np.uint32))
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    prepare("ids", folder, tmp_path / "out")
    corpus = Corpus.load(tmp_path / "out")
    assert corpus.tokenizer.words == tuple(words) and tokens(corpus) == expected
    assert corpus.manifest["splits"]["train"]["unknown"] == expected["train"].count(words.index("<unk>"))


def test_fetching(tmp_path, monkeypatch):
    from types import SimpleNamespace

    texts = write_wikitext(tmp_path / "files")
    hub = {"train": "train", "validation": "valid", "test": "test"}
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {
            hub_name: [{"text": f"{row}\n" if row.strip() else ""} for row in texts[s]] for hub_name, s in hub.items()
        }

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    said = []
    prepare("wikitext2", None, tmp_path / "out", allow_other=True, report=lambda stage, _: said.append(stage))
    corpus = Corpus.load(tmp_path / "out")
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")] and "Hugging Face" in said[0]
    assert tokens(corpus) == naive(texts)[1]
    assert corpus.manifest["source"]["name"] == "Salesforce/wikitext wikitext-2-v1"
    assert not prepare("wikitext2", None, tmp_path / "out").fresh


def test_the_published_counts_are_asked_for(wikitext, tmp_path, monkeypatch):
    from dataclasses import replace

    texts, folder = wikitext
    words, expected = naive(texts)
    row = CORPORA["wikitext103"]
    facts = row.official._replace(words=len(words), **{split: len(expected[split]) for split in SPLITS})
    monkeypatch.setitem(CORPORA, "wikitext103", replace(row, official=facts))
    manifest, _ = prepare("wikitext103", folder, tmp_path / "out")
    assert manifest["official"] is True and manifest["name"] == "WikiText-103"


def test_a_file_as_long_as_enwik8_is_not_enwik8(tmp_path, monkeypatch):
    from dataclasses import replace

    (tmp_path / "enwik8").write_bytes(b"a" * 100)
    row = CORPORA["enwik8"]
    sizes = row.official._replace(train=90, valid=5, test=5)
    monkeypatch.setitem(CORPORA, "enwik8", replace(row, official=sizes))
    with pytest.raises(ValueError, match=r"not all of it: SHA-256 28165978.*, not 2b49720e"):
        prepare("enwik8", tmp_path, tmp_path / "out")
    real = sizes._replace(content=hashlib.sha256(b"a" * 100).hexdigest())
    monkeypatch.setitem(CORPORA, "enwik8", replace(row, official=real))
    assert prepare("enwik8", tmp_path, tmp_path / "out").manifest["official"] is True


def test_two_at_once_prepare_it_once(wikitext, tmp_path):
    pytest.importorskip("fcntl")
    code = f"""
from fastweights.data.prepare import prepare
print(prepare("wikitext2", {str(wikitext[1])!r}, {str(tmp_path / "out")!r}, allow_other=True).fresh)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    assert sorted(process.communicate()[0].strip() for process in processes) == [b"False", b"False", b"True"]
    Corpus.load(tmp_path / "out", verify=True)
