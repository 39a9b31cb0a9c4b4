"""Byte pair encoding: every text comes back, specials are never made from text, and training has one outcome."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastweights.data.manifest import DataError
from fastweights.data.pairs.bpe import BOS, EOS, PAD, UNK, PairTokenizer

TEXTS = [f"the {word} and the {word}s, über {word}" for word in ("cat", "dog", "Straße", "dreiundzwanzig")] * 3
LEAST = 4 + 256
TOKENIZER = PairTokenizer.train(TEXTS, LEAST + 20)


@given(st.lists(st.text(max_size=40), max_size=4))
def test_any_text_comes_back(texts):
    rows = TOKENIZER.encode_batch(texts)
    assert [TOKENIZER.decode(row) for row in rows] == texts
    assert all(4 <= number < TOKENIZER.size for row in rows for number in row)


@pytest.mark.parametrize(
    "text", ["<pad> <s></s> <unk>", "</s>", "", " ", "  two  spaces ", "a\u2028b\rc\x85", "東京 🙂"]
)
def test_awkward_texts_come_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode([BOS, *TOKENIZER.encode(text), EOS, PAD, UNK]) == text


def test_one_sentence_and_many():
    assert TOKENIZER.encode_batch(TEXTS) == [TOKENIZER.encode(text) for text in TEXTS]


def test_frequent_words_are_one_piece_wherever_they_stand():
    alone, inside = TOKENIZER.encode("the"), TOKENIZER.encode("the the")
    assert len(alone) == 1 and inside == alone * 2


def test_size():
    assert TOKENIZER.size == LEAST + 20
    # Every pair of pieces that comes twice is merged, and then there are no more.
    small = PairTokenizer.train(TEXTS, 32_000)
    assert LEAST + 20 < small.size < 400
    rows = small.encode_batch(TEXTS)
    assert all(len(row) == len(text.replace(",", " ,").split()) for row, text in zip(rows, TEXTS, strict=True))
    with pytest.raises(DataError, match="260 pieces"):
        PairTokenizer.train(TEXTS, 259)


def test_training_and_files_have_one_outcome():
    again = PairTokenizer.train(iter(TEXTS), LEAST + 20)
    loaded = PairTokenizer.load(TOKENIZER.dump())
    assert again.dump() == loaded.dump() == TOKENIZER.dump()
    assert again.sha256 == loaded.sha256 == TOKENIZER.sha256 != PairTokenizer.train(TEXTS, LEAST + 21).sha256
    assert loaded.encode_batch(TEXTS) == TOKENIZER.encode_batch(TEXTS)


def test_what_is_no_tokenizer():
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        PairTokenizer.load(b"{}")
    with pytest.raises(DataError, match=r"pieces 0 … 3 .*'<bos>'"):
        PairTokenizer.load(TOKENIZER.dump().replace(b'"<s>"', b'"<bos>"'))
