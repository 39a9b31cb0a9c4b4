"""Text to token numbers and back. To add a kind of vocabulary, add a class here: the rest only uses `Vocabulary`."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Self, TypeVar

from fastweights.data.manifest import DataError

EOS = "<eos>"
UNKNOWN = "<unk>"


class Vocabulary(ABC):
    """Numbers 0 … len - 1 for the pieces of a text; `unknown` is the number of all other pieces, where there is one."""

    kind: ClassVar[str]
    file: ClassVar[str]
    unknown: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's pieces. Nothing is added at its end, so that a model can continue it."""

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


VOCABULARIES: dict[str, type[Vocabulary]] = {}
Kind = TypeVar("Kind", bound=type[Vocabulary])


def _vocabulary(kind: str, file: str) -> Callable[[Kind], Kind]:
    def enter(cls: Kind) -> Kind:
        cls.kind, cls.file = kind, file
        VOCABULARIES[kind] = cls
        return cls

    return enter


@_vocabulary("words", "vocabulary.txt")
class WordVocabulary(Vocabulary):
    """Words between white space; `<eos>` ends a line. On disk one word a line, its number being that of the line."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._index = {word: number for number, word in enumerate(self.words)}
        if len(self._index) != len(self.words):
            twice = next(word for number, word in enumerate(self.words) if self._index[word] != number)
            raise DataError(f"{twice!r} is in the vocabulary twice")
        self.unknown = self._index.get(UNKNOWN)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._index

    def __getitem__(self, word: str) -> int:
        """Return the number of a word, that of `<unk>` if it is not known."""
        number = self._index.get(word, self.unknown)
        if number is None:
            raise DataError(f"{word!r} is not in the vocabulary of {len(self):,} words, which has no {UNKNOWN!r}")
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


@_vocabulary("bytes", "vocabulary.json")
class ByteVocabulary(Vocabulary):
    """The 256 bytes, each its own number; text is UTF-8."""

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield characters as soon as they are whole; bytes that are none become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in ids:
            yield decoder.decode(bytes([number]))
        yield decoder.decode(b"", final=True)

    def dump(self) -> bytes:
        return json.dumps({"kind": self.kind, "size": len(self)}).encode() + b"\n"

    @classmethod
    def load(cls, content: bytes) -> Self:
        return cls()


def split_words(text: str) -> list[str]:
    """Split a text at white space, with `<eos>` at the end of each line."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\n", f" {EOS} ").split()
