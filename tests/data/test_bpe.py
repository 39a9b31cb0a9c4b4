"""Byte pair encoding: every text comes back, specials are never made from text, and training has one outcome."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastweights.data.manifest import DataError
from fastweights.data.pairs.bpe import BOS, EOS, LEAST, PAD, UNK, Tokenizer, train_tokenizer

TEXTS = [f"the {word} and the {word}s, über {word}" for word in ("cat", "dog", "Straße", "dreiundzwanzig")] * 3
TOKENIZER = train_tokenizer(TEXTS, LEAST + 20)


@given(st.lists(st.text(max_size=40), max_size=4))
def test_any_text_comes_back(texts):
    rows = TOKENIZER.encode(texts)
    assert TOKENIZER.decode(rows) == texts
    assert all(4 <= number < len(TOKENIZER) for row in rows for number in row)


@pytest.mark.parametrize(
    "text", ["<pad> <s></s> <unk>", "</s>", "", " ", "  two  spaces ", "a\u2028b\rc\x85", "東京 🙂"]
)
def test_awkward_texts_come_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode([text])) == [text]
    assert TOKENIZER.decode([[BOS, *TOKENIZER.encode([text])[0], EOS, PAD, UNK]]) == [text]


def test_frequent_words_are_one_piece_wherever_they_stand():
    (alone,), (inside,) = TOKENIZER.encode(["the"]), TOKENIZER.encode(["the the"])
    assert len(alone) == 1 and inside == alone * 2


def test_size():
    assert len(TOKENIZER) == LEAST + 20
    # Every pair of pieces that comes twice is merged, and then there are no more.
    small = train_tokenizer(TEXTS, 32_000)
    assert LEAST + 20 < len(small) < 400
    assert all(
        len(row) == len(text.replace(",", " ,").split()) for row, text in zip(small.encode(TEXTS), TEXTS, strict=True)
    )
    with pytest.raises(DataError, match="260 pieces"):
        train_tokenizer(TEXTS, 259)


def test_training_and_files_have_one_outcome():
    again = train_tokenizer(iter(TEXTS), LEAST + 20)
    loaded = Tokenizer.load(TOKENIZER.dump())
    assert again.dump() == loaded.dump() == TOKENIZER.dump()
    assert again.sha256 == loaded.sha256 == TOKENIZER.sha256 != train_tokenizer(TEXTS, LEAST + 21).sha256
    assert loaded.encode(TEXTS) == TOKENIZER.encode(TEXTS)


def test_what_is_no_tokenizer():
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        Tokenizer.load(b"{}")
    with pytest.raises(DataError, match=r"pieces 0 … 3 .*'<bos>'"):
        Tokenizer.load(TOKENIZER.dump().replace(b'"<s>"', b'"<bos>"'))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"fastweights\[mt\]"):
        train_tokenizer(TEXTS, 300)
