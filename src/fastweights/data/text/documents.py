"""Where the documents of a token stream begin: `DOCUMENTS` is the table of ways to tell."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.data.manifest import DataError
from fastweights.data.text.corpus import TokenStream
from fastweights.data.text.vocabulary import EOS, ByteVocabulary, Vocabulary, WordVocabulary


def articles(tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Mark article titles of WikiText: a line `= Title =` with an empty line before and after it.

    Headings of sections have two or more signs a side. Where a corpus gives them one, its sections are its documents.
    """
    if not isinstance(vocabulary, WordVocabulary) or not {EOS, "="} <= set(vocabulary.words):
        raise DataError("documents 'articles' begin with a line = Title =, which takes a vocabulary with the word '='")
    eos, sign = tokens == vocabulary[EOS], tokens == vocabulary["="]
    starts = torch.zeros_like(eos)
    ends = eos.nonzero().squeeze(-1)
    # The stream may begin with a title, as if lines had come before it.
    begins = torch.cat([ends.new_zeros(1), ends + 1])[:-1]
    titled = ends - begins >= 3
    begins, ends = begins[titled], ends[titled]

    def empty(line_end: Tensor) -> Tensor:
        return (line_end < 0) | (line_end >= len(eos)) | eos[line_end.clamp(0, len(eos) - 1)]

    title = sign[begins] & ~sign[begins + 1] & sign[ends - 1] & ~sign[ends - 2]
    title &= empty(begins - 2) & empty(ends + 1)
    starts[begins[title]] = True
    return starts


def paragraphs(tokens: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Mark whatever follows one or more empty lines."""
    if isinstance(vocabulary, WordVocabulary):
        line_end = vocabulary[EOS]
    elif isinstance(vocabulary, ByteVocabulary):
        line_end = ord("\n")
    else:
        raise DataError(f"documents 'paragraphs' are not known for a vocabulary of {vocabulary.kind}")
    ends = tokens == line_end
    starts = torch.zeros_like(ends)
    starts[2:] = ends[:-2] & ends[1:-1] & ~ends[2:]
    return starts


DOCUMENTS: dict[str, Callable[[Tensor, Vocabulary], Tensor] | None] = {
    "none": None,
    "articles": articles,
    "paragraphs": paragraphs,
}


def mark_documents(stream: TokenStream, vocabulary: Vocabulary, kind: str) -> TokenStream:
    """Return the stream with `starts`, which its segments and windows then have too."""
    find = look_up(DOCUMENTS, kind, "kind of documents")
    if find is None:
        return stream
    # Comparisons are not there for uint16, and int32 holds every vocabulary.
    return TokenStream(stream.tokens, find(stream.tokens.to(torch.int32), vocabulary))
