"""The published files, where they are: their counts are the published ones."""

import pytest

from fastweights.data.manifest import sets
from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus
from tests.data.corpora import REAL, SPLITS


def real(name):
    folder = REAL / name
    return pytest.param(folder, marks=pytest.mark.skipif(not folder.is_dir(), reason=f"{name} is not in {REAL}"))


@pytest.mark.parametrize("folder", [real("wikitext-2")])
def test_wikitext2(folder, tmp_path):
    manifest, _ = prepare("wikitext2", folder, tmp_path)
    assert manifest["official"] and manifest["name"] == "WikiText-2"
    assert sets(manifest) == {split: f"wiki.{split}.tokens of WikiText-2" for split in SPLITS[1:]}
    assert [manifest["splits"][split]["out_of_vocabulary"] for split in SPLITS] == [0, 0, 0]
    corpus = Corpus.load(tmp_path)
    assert corpus.tokenizer.words[:4] == ("<eos>", "the", ",", ".")
    for split in SPLITS:
        rows = (folder / f"wiki.{split}.tokens").read_text(encoding="utf-8").split("\n")[:-1]
        text = corpus.tokenizer.decode(corpus.split(split).tokens.tolist())
        assert text == "".join(" ".join(row.split()) + "\n" for row in rows)


@pytest.mark.parametrize("folder", [real("wikitext-103")])
def test_wikitext103_valid_and_test(folder, tmp_path):
    files = {split: folder / f"wiki.{split}.tokens" for split in SPLITS[1:]}
    manifest, _ = prepare("text", files["valid"], tmp_path, **files)
    assert sets(manifest) == {split: f"wiki.{split}.tokens of WikiText-103" for split in SPLITS[1:]}
    corpus = Corpus.load(tmp_path)
    assert len(corpus.valid) == len(corpus.train) == 217_646 and len(corpus.test) == 245_569
    for stream, predictions in ((corpus.valid, 217_645), (corpus.test, 245_568)):
        windows = stream.windows(256, batch=512)
        assert windows.predictions == predictions
        assert sum(window.targets.numel() for window in windows) == predictions
        assert stream.segments(1, 256).predictions == predictions
