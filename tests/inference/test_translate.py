"""Lines through a translation model: in their order, empty ones kept, whatever the batches."""

import pytest
import torch

from fastweights.inference.beam import Search
from fastweights.inference.translate import n_best, pad_sources, stream, translate
from fastweights.models.translation import TranslationModel
from tests.training.small_pairs import small_pairs, small_translation

LINES = ["the cat", "", "a big house and dogs", "naïve", "   ", "the the the cat sees dogs"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_pairs(tmp_path_factory.mktemp("translate"))


@pytest.fixture
def model(corpus):
    """Untrained, but with an opinion on every source."""
    torch.manual_seed(0)
    model = TranslationModel(small_translation(corpus)[0].model).double()
    words = 3 * torch.randn(corpus.tokenizer.size, 16, dtype=torch.float64)
    model.logits = lambda hidden: hidden @ words.mT
    return model


def texts(found):
    return [[translation.text for translation in translations] for translations in found]


def test_order_and_empty_lines_are_kept_whatever_the_batch(corpus, model):
    alone = [translate(model, corpus.tokenizer, [line], beam=2, max_length=6)[0] for line in LINES]
    assert alone[1] == alone[4] == "" and len(set(alone)) > 2
    told = []
    report = lambda done, total: told.append((done, total))  # noqa: E731
    for batch in (1, 2, 64):
        assert translate(model, corpus.tokenizer, LINES, beam=2, batch=batch, max_length=6, report=report) == alone
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4), (2, 4), (4, 4), (4, 4)]
    assert translate(model, corpus.tokenizer, []) == []
    assert model.training


def test_a_stream_is_read_as_it_is_written(corpus, model):
    read = []

    def groups():
        for start in (0, 3):
            read.extend(LINES[start : start + 3])
            yield LINES[start : start + 3]

    search = Search(beam=3, n_best=2, max_length=6)
    whole = n_best(model, corpus.tokenizer, LINES, search)
    assert [len(found) for found in whole] == [2, 0, 2, 2, 0, 2]
    assert all(first.score >= second.score for first, second in filter(None, whole))
    found = []
    for part in stream(model, corpus.tokenizer, groups(), search, batch=2):
        found.append(part)
        assert len(read) == -(-len(found) // 3) * 3
    assert texts(found) == texts(whole) == texts(stream(model, corpus.tokenizer, [LINES], search))


def test_no_translation_has_a_line_of_its_own(corpus, model):
    newline = corpus.tokenizer.encode("\n")[-1]
    model.logits = lambda hidden: (
        torch.zeros(*hidden.shape[:-1], corpus.tokenizer.size).double().index_fill(-1, torch.tensor([newline]), 9.0)
    )
    (found,) = translate(model, corpus.tokenizer, ["the cat"], max_length=4)
    assert found.isspace() and "\n" not in found


def test_sources_end_and_are_padded_on_the_right():
    source, mask = pad_sources([[7, 8, 9], [5]])
    assert source.tolist() == [[7, 8, 9, 2], [5, 2, 0, 0]]
    assert mask.tolist() == [[True] * 4, [True, True, False, False]]


def test_batches_have_lines(corpus, model):
    with pytest.raises(ValueError, match="batch must be at least 1 line, got 0"):
        translate(model, corpus.tokenizer, LINES, batch=0)
