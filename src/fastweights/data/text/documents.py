"""Where the documents of a token stream begin: `DOCUMENTS` is the table of ways to tell."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.data.manifest import DataError
from fastweights.data.text.corpus import TokenStream
from fastweights.data.tokenizer import EOS, Tokenizer, WordTokenizer


def articles(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Mark article titles of WikiText: a line `= Title =` with an empty line before and after it.

    Headings of sections have two or more signs a side. Where a corpus gives them one, its sections are its documents.
    """
    if not isinstance(tokenizer, WordTokenizer) or not {EOS, "="} <= set(tokenizer.words):
        raise DataError("documents 'articles' begin with a line = Title =, which takes a vocabulary with the word '='")
    eos, sign = tokens == tokenizer[EOS], tokens == tokenizer["="]
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


def paragraphs(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Mark whatever follows one or more empty lines."""
    line_ends = [number for number in range(tokenizer.size) if tokenizer.decode([number]).endswith("\n")]
    ends = torch.isin(tokens, torch.tensor(line_ends, dtype=tokens.dtype, device=tokens.device))
    starts = torch.zeros_like(ends)
    starts[2:] = ends[:-2] & ends[1:-1] & ~ends[2:]
    return starts


DOCUMENTS: dict[str, Callable[[Tensor, Tokenizer], Tensor] | None] = {
    "none": None,
    "articles": articles,
    "paragraphs": paragraphs,
}


def mark_documents(stream: TokenStream, tokenizer: Tokenizer, kind: str) -> TokenStream:
    """Return the stream with `starts`, which its segments and windows then have too."""
    find = look_up(DOCUMENTS, kind, "kind of documents")
    if find is None:
        return stream
    # Comparisons are not there for uint16, and int32 holds every vocabulary.
    return TokenStream(stream.tokens, find(stream.tokens.to(torch.int32), tokenizer))
