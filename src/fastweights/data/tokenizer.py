"""Text to token numbers and back: one `Tokenizer` for each value of `fastweights data text --tokens`.

    words        words between white space; those outside the vocabulary become <unk>
    bpe          byte pair encoding, trained with the `tokenizers` library
    characters   the characters of the training text; others are spelled in bytes
    bytes        UTF-8

All but words give back any text exactly. To add a kind, add a class here. Nothing here needs PyTorch.
"""

import codecs
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, Self

import tokenizers
from tokenizers import pre_tokenizers

from fastweights.data.manifest import DataError

EOS = "<eos>"
UNKNOWN = "<unk>"
# Pieces of byte pair encoding by default.
PIECES = 8_192
BYTES = [bytes([number]) for number in range(256)]


class Tokenizer(ABC):
    """Numbers 0 … size - 1 for the tokens of a text; `unknown` is the number of all others, where there is one.

    Attributes:
        kind: its name in a manifest and for `--tokens`.
        unit: what one token is called.
        file: name of the file that keeps it.
        size: number of different tokens.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]
    file: ClassVar[str]
    size: int
    unknown: int | None = None

    @property
    def dtype(self) -> str:
        """The smallest type that holds every number."""
        return "uint16" if self.size <= 1 << 16 else "uint32"

    @classmethod
    @abstractmethod
    def train(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        """Learn the vocabulary: at most `size` tokens, of what comes at least `min_count` times in these texts."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's tokens. Nothing is added at its end, so that a model can continue it."""

    @abstractmethod
    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield text as its numbers come: for each number what it adds, together what `decode` gives."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of these numbers."""
        return "".join(self.stream(ids))

    @abstractmethod
    def dump(self) -> bytes:
        """Return the content of the file that `load` reads."""

    @classmethod
    @abstractmethod
    def load(cls, content: bytes) -> Self: ...


class WordTokenizer(Tokenizer):
    """Words between white space; `<eos>` ends a line. On disk one word a line, its number being that of the line."""

    kind, unit, file = "words", "word", "vocabulary.txt"

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.size = tuple(words), len(words)
        self._index = {word: number for number, word in enumerate(self.words)}
        if len(self._index) != self.size:
            twice = next(word for number, word in enumerate(self.words) if self._index[word] != number)
            raise DataError(f"{twice!r} is in the vocabulary twice")
        self.unknown = self._index.get(UNKNOWN)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        """Take `<eos>`, then the words by frequency, of equally frequent ones the first seen first.

        Words that fall to a limit become `<unk>`, which stands second if the texts have none of their own.
        """
        _check_size(size, 2, f"{EOS} and {UNKNOWN} are always there")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
        kept = [word for word, count in counts.most_common() if count >= min_count and word != EOS]
        words = [EOS, *kept][:size]
        return cls(words if UNKNOWN in words else [EOS, UNKNOWN, *kept][:size])

    def __contains__(self, word: object) -> bool:
        return word in self._index

    def __getitem__(self, word: str) -> int:
        """Return the number of a word, that of `<unk>` if it is not known."""
        number = self._index.get(word, self.unknown)
        if number is None:
            raise DataError(f"{word!r} is not in the vocabulary of {self.size:,} words, which has no {UNKNOWN!r}")
        return number

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Return the numbers of many words."""
        if self.unknown is None:
            return [self[word] for word in words]
        get, unknown = self._index.get, self.unknown
        return [get(word, unknown) for word in words]

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the words of a text; the end of a line becomes `<eos>`."""
        return self.numbers(split_words(text))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield words with a space between them; `<eos>` ends the line."""
        space = ""
        for number in ids:
            word = self.words[number]
            yield "\n" if word == EOS else space + word
            space = "" if word == EOS else " "

    def dump(self) -> bytes:
        return "".join(f"{word}\n" for word in self.words).encode()

    @classmethod
    def load(cls, content: bytes) -> Self:
        return cls(content.decode().removesuffix("\n").split("\n"))


class SpelledTokenizer(Tokenizer):
    """Tokens that stand for bytes of UTF-8, among them every single byte: any text is decoded as it was."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.size = pieces, len(pieces)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield characters as soon as they are whole; bytes that are none become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in ids:
            yield decoder.decode(self.pieces[number])
        yield decoder.decode(b"", final=True)


class ByteTokenizer(SpelledTokenizer):
    """The 256 bytes, each its own number; text is UTF-8."""

    kind, unit, file = "bytes", "byte", "vocabulary.json"

    def __init__(self) -> None:
        super().__init__(BYTES)

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        return cls()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def dump(self) -> bytes:
        return json.dumps({"kind": self.kind, "size": self.size}).encode() + b"\n"

    @classmethod
    def load(cls, content: bytes) -> Self:
        return cls()


class CharacterTokenizer(SpelledTokenizer):
    """The 256 bytes, of which the first 128 are the characters of ASCII, then other characters.

    A character that has no number of its own is spelled in the bytes of its UTF-8, so that nothing is unknown.
    """

    kind, unit, file = "characters", "character", "characters.json"

    def __init__(self, characters: str) -> None:
        super().__init__([*BYTES, *(character.encode() for character in characters)])
        self.characters = characters
        self._index = {chr(number): number for number in range(128)}
        self._index |= {character: number for number, character in enumerate(characters, start=256)}
        if len(self._index) != 128 + len(characters):
            raise DataError("a character is in the vocabulary twice, or one of ASCII, which is always there")

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        """Give numbers to the characters of these texts, frequent ones first, up to a vocabulary of `size`."""
        _check_size(size, len(BYTES), "the bytes are always there")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        kept = [c for c in sorted(counts) if counts[c] >= min_count and not c.isascii()]
        kept.sort(key=counts.__getitem__, reverse=True)
        return cls("".join(kept[: None if size is None else size - len(BYTES)]))

    def encode(self, text: str) -> list[int]:
        """Return the number of each character, or those of its bytes."""
        index = self._index
        if set(text) <= index.keys():
            return [index[character] for character in text]
        return list(chain.from_iterable([index[c]] if c in index else c.encode() for c in text))

    def dump(self) -> bytes:
        return json.dumps({"kind": self.kind, "size": self.size, "characters": self.characters}).encode() + b"\n"

    @classmethod
    def load(cls, content: bytes) -> Self:
        try:
            return cls(json.loads(content)["characters"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"this is not a {cls.file}: {error!r}") from None


class PieceTokenizer(SpelledTokenizer):
    """Byte pair encoding; its file is the JSON of the `tokenizers` library.

    A piece never reaches over the end of a line, so that a text can be encoded line by line. The `specials` have the
    first numbers, are spelled with no bytes, and are no "added tokens": a text may say "</s>" and still comes back.
    """

    kind, unit, file = "bpe", "piece", "tokenizer.json"
    specials: ClassVar[tuple[str, ...]] = ()

    def __init__(self, content: bytes) -> None:
        self._content, count, letters = content, len(self.specials), byte_letters()
        try:
            self._inner = tokenizers.Tokenizer.from_str(content.decode())
            vocabulary: dict[str, int] = json.loads(content)["model"]["vocab"]
            words = sorted(vocabulary, key=vocabulary.__getitem__)
            super().__init__([b""] * count + [bytes(letters[letter] for letter in word) for word in words[count:]])
        except Exception as error:
            # The library raises bare Exceptions, and a KeyError is a letter that stands for no byte.
            raise DataError(f"this is not a {self.file} of byte pairs: {error!r}") from None
        if tuple(words[:count]) != self.specials:
            raise DataError(
                f"pieces 0 … {count - 1} of a tokenizer must be {self.specials}, this one has {tuple(words[:count])}"
            )

    @classmethod
    def train(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        """Merge up to `size` pieces, fewer where no pair of pieces is left that comes `min_count` times, or twice."""
        size = PIECES if size is None else size
        least = len(cls.specials) + len(BYTES)
        _check_size(size, least, f"bytes and specials are {least} pieces")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = cls._pre_tokenizer()
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=max(min_count, 2),
            show_progress=False,
            special_tokens=list(cls.specials),
            initial_alphabet=sorted(byte_letters()),
        )
        inner.train_from_iterator((line for text in texts for line in cls._lines(text)), trainer)
        content = json.loads(inner.to_str())
        content["added_tokens"] = []
        return cls((json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())

    @classmethod
    def _pre_tokenizer(cls) -> Any:
        """Return what cuts a text into lines, and those into words with the space before them."""
        lines = pre_tokenizers.Split("\n", "merged_with_previous")
        return pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])

    @classmethod
    def _lines(cls, text: str) -> list[str]:
        """Return the parts of a text that are encoded apart: it is cut after each line feed, and nowhere else."""
        *lines, rest = text.split("\n")
        return [f"{line}\n" for line in lines] + ([rest] if rest else [])

    def encode(self, text: str) -> list[int]:
        return list(chain.from_iterable(self._encode(self._lines(text))))

    def _encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self._inner.encode_batch_fast(lines, add_special_tokens=False)]

    def dump(self) -> bytes:
        return self._content

    @classmethod
    def load(cls, content: bytes) -> Self:
        return cls(content)


TOKENIZERS: dict[str, type[Tokenizer]] = {
    each.kind: each for each in (WordTokenizer, PieceTokenizer, CharacterTokenizer, ByteTokenizer)
}


def split_words(text: str) -> list[str]:
    """Split a text at white space, with `<eos>` at the end of each line."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\n", f" {EOS} ").split()


def _check_size(size: int | None, least: int, why: str) -> None:
    if size is not None and size < least:
        raise DataError(f"--vocabulary-size must be at least {least}, got {size}: {why}")


def byte_letters() -> dict[str, int]:
    """Return the byte that each letter of the library's alphabet stands for: visible ones stand for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [number for number in range(256) if number not in visible]
    return {chr(number): number for number in visible} | {chr(256 + n): number for n, number in enumerate(hidden)}
