"""Text to numbers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastweights.data.manifest import DataError
from fastweights.data.text.vocabulary import VOCABULARIES, ByteVocabulary, WordVocabulary

WORDS = WordVocabulary(["<eos>", "the", "<unk>", "naïve", "東京"])


def test_words_both_ways():
    assert WORDS.encode("the naïve\n\n  東京 cat") == [1, 3, 0, 0, 4, 2]
    assert WORDS.decode([1, 3, 0, 0, 4, 2]) == "the naïve\n\n東京 <unk>"
    assert [WORDS[word] for word in WORDS.words] == list(range(len(WORDS))) == [0, 1, 2, 3, 4]
    assert WORDS["cat"] == WORDS.unknown == 2 and "cat" not in WORDS and "the" in WORDS
    assert WORDS.encode("") == [] and WORDS.decode([]) == ""


def test_without_an_unknown_word():
    words = WordVocabulary(["<eos>", "a"])
    assert words.encode("a\na") == [1, 0, 1]
    with pytest.raises(DataError, match="'b' is not in the vocabulary of 2 words"):
        words.encode("a b")


@pytest.mark.parametrize("vocabulary", [WORDS, ByteVocabulary()], ids=lambda v: v.kind)
def test_saved_and_loaded(vocabulary):
    again = VOCABULARIES[vocabulary.kind].load(vocabulary.dump())
    text = "the naïve 東京\nthe"
    assert len(again) == len(vocabulary) and again.encode(text) == vocabulary.encode(text)
    assert again.decode(again.encode(text)) == text


@given(st.text())
def test_bytes_hold_any_text(text):
    vocabulary = ByteVocabulary()
    numbers = vocabulary.encode(text)
    assert vocabulary.decode(numbers) == text and all(0 <= number < len(vocabulary) for number in numbers)


def test_text_comes_as_its_tokens_come():
    assert list(WORDS.stream([1, 3, 0, 4])) == ["the", " naïve", "\n", "東京"]
    assert list(ByteVocabulary().stream("aé".encode())) == ["a", "", "é", ""]
    assert ByteVocabulary().decode([97, 0xC3]) == "a\ufffd"
