"""Byte pair encoding shared by both languages, trained with `tokenizers`. Any text comes back exactly as it was.

Words keep the space before them and are made of bytes, so that no text has unknown pieces. Nothing here needs PyTorch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

from fastweights.data.manifest import DataError

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
# The specials and the 256 bytes: what a vocabulary has before the first merge.
LEAST = len(SPECIALS) + 256


class Tokenizer:
    """Numbers 4 … len - 1 for pieces of text; 0 … 3 are PAD, BOS, EOS and UNK, which no text becomes.

    The content of its file is the JSON of the `tokenizers` library. The specials have numbers in it but are no "added
    tokens": a text may say "</s>" and still comes back.
    """

    kind: ClassVar[str] = "pieces"
    file: ClassVar[str] = "tokenizer.json"

    def __init__(self, content: bytes) -> None:
        self._content = content
        try:
            self._inner = _library().Tokenizer.from_str(content.decode())
            specials = tuple(self._inner.id_to_token(number) for number in range(len(SPECIALS)))
        except DataError:
            raise
        except Exception as error:
            # The library raises bare Exceptions.
            raise DataError(f"this is not a tokenizer.json: {error}") from None
        if specials != SPECIALS:
            raise DataError(f"pieces 0 … 3 of a tokenizer must be {SPECIALS}, this one has {specials}")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers of each text, without specials."""
        # The first word is written like every other, with a space before it.
        coded = self._inner.encode_batch_fast([f" {text}" for text in texts], add_special_tokens=False)
        return [row.ids for row in coded]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row; specials are left out, and bytes that are no UTF-8 become U+FFFD."""
        kept = [[int(number) for number in row if number >= len(SPECIALS)] for row in rows]
        return [text.removeprefix(" ") for text in self._inner.decode_batch(kept, skip_special_tokens=False)]

    def __len__(self) -> int:
        return int(self._inner.get_vocab_size())

    @property
    def sha256(self) -> str:
        """Checksum of the file's content: the same for the same tokenizer."""
        return hashlib.sha256(self._content).hexdigest()

    def dump(self) -> bytes:
        """Return the content of the file that `load` reads."""
        return self._content

    @classmethod
    def load(cls, content: bytes) -> Self:
        return cls(content)


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a tokenizer of `size` pieces, or fewer where the texts have no more pairs of pieces that come twice."""
    if size < LEAST:
        raise DataError(f"a vocabulary has the {LEAST} pieces of every byte and special at least, got {size}")
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.train_from_iterator((f" {text}" for text in texts), trainer)
    content = json.loads(inner.to_str())
    content["added_tokens"] = []
    return Tokenizer((json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("byte pair encoding takes tokenizers: pip install 'fastweights[mt]'") from None
    return tokenizers
