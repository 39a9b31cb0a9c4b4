"""Number words: the languages' own rules, and no number in two splits."""

import sys

import pytest

from fastweights.data.manifest import DataError
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.pairs.numbers import english, german, lines, split_of
from fastweights.data.prepare import prepare

SPLITS = ("train", "valid", "test")


@pytest.mark.parametrize(
    ("number", "words", "wort"),
    [
        (0, "zero", "null"),
        (21, "twenty-one", "einundzwanzig"),
        (123, "one hundred twenty-three", "einhundertdreiundzwanzig"),
        (1234, "one thousand two hundred thirty-four", "eintausendzweihundertvierunddreißig"),
        (9016, "nine thousand sixteen", "neuntausendsechzehn"),
    ],
)
def test_words(number, words, wort):
    assert english(number) == words and german(number) == wort


def test_splits_share_no_number(tmp_path):
    manifest, _ = prepare("numbers", None, tmp_path, pairs=400, held_out=50, highest=1_999)
    corpus = ParallelCorpus.load(tmp_path)
    assert [len(corpus.split(split)) for split in SPLITS] == [400, 50, 50] and manifest["name"] == "numbers"
    by_words = {german(number): number for number in range(2_000)}
    assert len(by_words) == 2_000
    seen = {split: set() for split in SPLITS}
    for split in SPLITS:
        for source, target in zip(corpus.split(split).sources, corpus.split(split).targets, strict=True):
            numbers = [by_words[words] for words in target.split(", ")]
            assert source == ", ".join(map(english, numbers)) and 2 <= len(numbers) <= 4
            seen[split].update(numbers)
        assert {split_of(number) for number in seen[split]} == {split}
    assert not seen["train"] & seen["test"] and not seen["train"] & seen["valid"] and not seen["valid"] & seen["test"]
    assert min(seen["valid"] | seen["test"]) >= 100
    assert {len(str(number)) for number in seen["train"]} == {1, 2, 3, 4}


def test_a_tenth_each_is_held_out():
    counts = [sum(split_of(number) == split for number in range(100, 10_100)) for split in SPLITS]
    assert sum(counts) == 10_000 and all(850 < count < 1_150 for count in counts[1:])


def test_the_same_every_time(tmp_path):
    assert list(lines("train", 30, 999)) == list(lines("train", 40, 999))[:30] != list(lines("train", 30, 1_000))
    for name in "ab":
        prepare("numbers", None, tmp_path / name, pairs=200, held_out=20, highest=999)
    assert ParallelCorpus.load(tmp_path / "a").fingerprint == ParallelCorpus.load(tmp_path / "b").fingerprint


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(DataError, match=r"fastweights\[mt\]"):
        english.__wrapped__(3)
    with pytest.raises(DataError, match="has no source"):
        prepare("numbers", tmp_path, tmp_path / "out")
