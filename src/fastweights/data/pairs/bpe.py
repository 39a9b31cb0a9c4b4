"""Byte pair encoding shared by both languages. Any text comes back exactly as it was."""

import hashlib
from collections.abc import Iterable
from typing import Any

from tokenizers import pre_tokenizers

from fastweights.data.tokenizer import PieceTokenizer

PAD, BOS, EOS, UNK = 0, 1, 2, 3


class PairTokenizer(PieceTokenizer):
    """Numbers 4 … size - 1 for pieces of sentences; 0 … 3 are PAD, BOS, EOS and UNK, which no text becomes.

    The first word of a sentence is written like every other, with a space before it.
    """

    kind = "pieces"
    specials = ("<pad>", "<s>", "</s>", "<unk>")

    @classmethod
    def _pre_tokenizer(cls) -> Any:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)

    @classmethod
    def _lines(cls, text: str) -> list[str]:
        return [f" {text}"]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the numbers of each sentence, without specials."""
        return self._encode([f" {text}" for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; specials are left out, and bytes that are no UTF-8 become U+FFFD."""
        return super().decode(ids).removeprefix(" ")

    @property
    def sha256(self) -> str:
        """Checksum of the file's content: the same for the same tokenizer."""
        return hashlib.sha256(self.dump()).hexdigest()
