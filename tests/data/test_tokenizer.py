"""Text to numbers and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastweights.data.manifest import DataError
from fastweights.data.tokenizer import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    PieceTokenizer,
    WordTokenizer,
)

TEXT = "the naïve cat\n\nthe Straße 東京, the  cat\n\tthe naïve end\r\n" * 3
WORDS = WordTokenizer(["<eos>", "the", "<unk>", "naïve", "東京"])


def test_words_both_ways():
    assert WORDS.encode("the naïve\n\n  東京 cat") == [1, 3, 0, 0, 4, 2]
    assert WORDS.decode([1, 3, 0, 0, 4, 2]) == "the naïve\n\n東京 <unk>"
    assert [WORDS[word] for word in WORDS.words] == list(range(WORDS.size)) == [0, 1, 2, 3, 4]
    assert WORDS["cat"] == WORDS.unknown == 2 and "cat" not in WORDS and "the" in WORDS
    assert WORDS.encode("") == [] and WORDS.decode([]) == ""


def test_without_an_unknown_word():
    words = WordTokenizer(["<eos>", "a"])
    assert words.encode("a\na") == [1, 0, 1]
    with pytest.raises(DataError, match="'b' is not in the vocabulary of 2 words"):
        words.encode("a b")


EXACT = [ByteTokenizer(), CharacterTokenizer.train([TEXT], None, 1), PieceTokenizer.train([TEXT], 300)]


@pytest.mark.parametrize("tokenizer", [WORDS, *EXACT], ids=lambda each: each.kind)
def test_saved_and_loaded(tokenizer):
    again = TOKENIZERS[tokenizer.kind].load(tokenizer.dump())
    text = "the naïve 東京\nthe"
    assert again.size == tokenizer.size and again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda each: each.kind)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from([*TEXT, "the ", " \n", "\n\n", "é", "🙂"])).map("".join)))
def test_any_text_comes_back(tokenizer, text):
    numbers = tokenizer.encode(text)
    assert tokenizer.decode(numbers) == "".join(tokenizer.stream(iter(numbers))) == text
    assert all(0 <= number < tokenizer.size for number in numbers)
    # A corpus is encoded in parts that cut no line.
    cut = text.find("\n") + 1
    assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == numbers


@pytest.mark.parametrize("tokenizer", EXACT, ids=lambda each: each.kind)
def test_a_line_ends_with_one_token(tokenizer):
    numbers = tokenizer.encode(TEXT)
    assert sum(tokenizer.decode([number]).endswith("\n") for number in numbers) == TEXT.count("\n")


def test_characters_beyond_those_of_the_training_text_are_spelled():
    tokenizer = CharacterTokenizer.train([TEXT], None, 1)
    # By frequency, equals by code point; each comes three times but ï, which comes six times.
    assert tokenizer.characters == "ïß京東" and tokenizer.size == 260
    assert tokenizer.encode("aï京") == [97, 256, 258]
    assert tokenizer.encode("aé京") == [97, *"é".encode(), 258]
    assert CharacterTokenizer.train([TEXT], 257, 1).characters == "ï"
    assert CharacterTokenizer.train([TEXT], None, 4).characters == "ï"
    assert len(tokenizer.encode(TEXT)) == len(TEXT)


def test_frequent_words_become_pieces():
    tokenizer = PieceTokenizer.train([TEXT], 300)
    # No more pairs of pieces come twice.
    assert tokenizer.size == 284 and len(tokenizer.encode(" the the the")) == 3
    assert PieceTokenizer.train([TEXT], 300).dump() == tokenizer.dump()
    assert PieceTokenizer.train([TEXT], 270).size == 270 and PieceTokenizer.train([TEXT], 300, 99).size == 256
    assert len(PieceTokenizer.train([TEXT], 256).encode("aé")) == 3


@pytest.mark.parametrize("cls", [CharacterTokenizer, PieceTokenizer])
def test_too_small_a_vocabulary(cls):
    for size in (255, 0):
        with pytest.raises(DataError, match=f"--vocabulary-size must be at least 256, got {size}"):
            cls.train([TEXT], size, 1)


@pytest.mark.parametrize("cls", [CharacterTokenizer, PieceTokenizer])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"characters": 3}', b'{"model": {"vocab": {"a": 0}}}'])
def test_what_is_no_tokenizer(cls, content):
    with pytest.raises(DataError, match=f"this is not a {cls.file}"):
        cls.load(content)


def test_text_comes_as_its_tokens_come():
    assert list(WORDS.stream([1, 3, 0, 4])) == ["the", " naïve", "\n", "東京"]
    assert list(ByteTokenizer().stream("aé".encode())) == ["a", "", "é", ""]
    assert ByteTokenizer().decode([97, 0xC3]) == "a\ufffd"
    characters = CharacterTokenizer("ï")
    assert list(characters.stream([97, 256, *"é".encode(), 0xC3, 98])) == ["a", "ï", "", "é", "", "\ufffdb", ""]
