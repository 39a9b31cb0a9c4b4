"""Where documents begin, and that a model forgets there: rows of many documents are those documents one by one."""

from itertools import pairwise

import pytest
import torch

from fastweights.data.manifest import DataError
from fastweights.data.text.corpus import TokenStream
from fastweights.data.text.documents import DOCUMENTS, mark_documents
from fastweights.data.tokenizer import ByteTokenizer, WordTokenizer, split_words
from fastweights.training.tasks.evaluate import Protocol, measure
from tests.data.corpora import REAL
from tests.training.small_text import random_model

WIKI = """
 = One =

 The first article . = not a title =

 = = Section = =

 = neither is = this
 a = b

 = Two words =

 text
 = no empty line before =

 = =
"""


def mark(text, kind="articles"):
    words = split_words(text)
    vocabulary = WordTokenizer(list(dict.fromkeys(["<eos>", "<unk>", *words])))
    stream = mark_documents(TokenStream(torch.tensor(vocabulary.numbers(words), dtype=torch.uint16)), vocabulary, kind)
    return [" ".join(words[i : i + 3]) for i in stream.starts.nonzero().flatten().tolist()]


def test_articles_begin_with_a_title():
    assert mark(WIKI) == ["= One =", "= Two words"]
    assert mark(WIKI.lstrip("\n")) == ["= One =", "= Two words"]
    assert mark("a = b\n") == []


def test_paragraphs_follow_empty_lines():
    assert mark("a\nb\n\nc d e\n\n\nf\n", "paragraphs") == ["c d e", "f <eos>"]
    stream = TokenStream(torch.tensor(list(b"ab\n\nc\n\n\nd"), dtype=torch.uint16))
    assert mark_documents(stream, ByteTokenizer(), "paragraphs").starts.nonzero().flatten().tolist() == [4, 8]


def test_what_cannot_be_found_is_refused():
    stream = TokenStream(torch.zeros(5, dtype=torch.uint16))
    with pytest.raises(DataError, match="the word '='"):
        mark_documents(stream, ByteTokenizer(), "articles")
    with pytest.raises(ValueError, match=r"none.*articles"):
        mark_documents(stream, ByteTokenizer(), "chapters")
    assert mark_documents(stream, ByteTokenizer(), "none") is stream


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_every_kind_reads_the_embedded_corpus(embedded_corpus, kind):
    starts = mark_documents(embedded_corpus.valid, embedded_corpus.tokenizer, kind).starts
    assert starts is None if kind == "none" else starts.sum() > 2


def test_wikitext_has_sixty_articles_to_validate():
    path = REAL / "wikitext-103" / "wiki.valid.tokens"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    assert len(mark(path.read_text())) == 60


@pytest.mark.parametrize("segment", [1, 5, 16])
@pytest.mark.parametrize("name", ["segment", "sliding"])
def test_carried_text_is_its_documents_one_by_one(name, segment):
    """The first word of a document is predicted from the last of the one before, the rest from nothing before it."""
    model = random_model(rule="delta", normalization="both")
    tokens = torch.randint(23, (61,), generator=torch.Generator().manual_seed(2))
    starts = torch.zeros(61, dtype=torch.bool)
    starts[[7, 20, 21, 44]] = True
    bounds = [0, 7, 20, 21, 44, 60]
    with torch.no_grad():
        pieces = [model.loss(tokens[None, a:b], tokens[None, a + 1 : b + 1])[0] for a, b in pairwise(bounds)]
    expected = torch.cat(pieces, 1)
    if name == "sliding":
        how = Protocol(name=name, segment=60, batch=1, stride=segment)
    else:
        how = Protocol(name=name, segment=segment, batch=1, carry=True)
    found = measure(model, TokenStream(tokens, starts), how)
    assert found.tokens == 60 and found.nll == pytest.approx(float(expected.sum()), rel=1e-12)


def test_windows_carry_their_starts():
    tokens, starts = torch.arange(40), torch.zeros(40, dtype=torch.bool)
    starts[[3, 17, 30]] = True
    for window in TokenStream(tokens, starts).windows(6, 2, batch=3):
        assert torch.equal(window.starts, starts[window.inputs])


@pytest.mark.parametrize("options", [{"mixer": "softmax"}, {"mixer": "relative"}, {"positions": "sinusoid"}])
def test_models_that_cannot_forget_say_so(options):
    model, tokens = random_model(**options), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="documents 'none'"):
        model(tokens, starts=torch.zeros(1, 4, dtype=torch.bool))


def test_a_text_without_a_line_end():
    words = WordTokenizer(["<eos>", "=", "a"])
    for kind in ("articles", "paragraphs"):
        marked = mark_documents(TokenStream(torch.tensor([1, 2, 1, 2])), words, kind)
        assert not marked.starts.any()
