"""Beam search against exhaustive search, greedy search, itself one by one, and itself without stopping early."""

import itertools

import pytest
import torch

from fastweights.data.pairs.bpe import BOS, EOS, PAD
from fastweights.inference.beam import EXTRA_LENGTH, Search, beam_search
from tests.models.test_translation import V, make

ALPHA = 0.6
KINDS = ["softmax", "linear", "delta", "performer"]


def sources(B=4):
    torch.manual_seed(7)
    lengths = torch.tensor([6, 1, 3, 4][:B])
    return torch.randint(4, V, (B, 6)), torch.arange(6) < lengths.unsqueeze(1)


def sharp(kind):
    """A model that is surer of itself and of the end than untrained weights are, with other words than its input's."""
    model = make(kind)
    torch.manual_seed(5)
    words = 2 * torch.randn(V, 8, dtype=torch.float64)
    model.logits = lambda hidden: hidden @ words.mT + torch.nn.functional.one_hot(torch.tensor(EOS), V)
    return model


def log_probs(model, source, mask, sentences):
    """log p of sentences of one length with their ends, by the forward pass over all of them."""
    y = torch.tensor(sentences, dtype=torch.int64)
    target, following = (torch.nn.functional.pad(y, at, value=value) for at, value in (((1, 0), BOS), ((0, 1), EOS)))
    rows = source.expand(len(y), -1), mask.expand(len(y), -1)
    log_p = model(*rows, target).log_softmax(-1)
    return log_p.gather(-1, following.unsqueeze(-1)).sum((1, 2)).tolist()


def greedy(model, source, mask, limit):
    """The likeliest token again and again, each time by the forward pass over all so far."""
    tokens = []
    while len(tokens) < limit - 1:
        log_p = model(source, mask, torch.tensor([[BOS, *tokens]]))[0, -1]
        log_p[[PAD, BOS]] = -torch.inf
        if int(log_p.argmax()) == EOS:
            break
        tokens.append(int(log_p.argmax()))
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_beam_for_everything_is_exhaustive_search(kind):
    model, (source, mask) = sharp(kind), sources()
    words, limit = [w for w in range(V) if w not in (PAD, BOS, EOS)], 3
    every = [[list(y) for y in itertools.product(words, repeat=n)] for n in range(limit)]
    found = beam_search(model, source, mask, beam=V**2, n_best=8, max_length=limit, length_penalty=ALPHA)
    with torch.no_grad():
        for i in range(len(source)):
            row = slice(i, i + 1)
            scored = []
            for group in every:
                scored += zip(log_probs(model, source[row], mask[row], group), group, strict=True)
            ranked = sorted(((p / ((5 + len(y) + 1) / 6) ** ALPHA, p, y) for p, y in scored), reverse=True)[:8]
            assert [h.tokens for h in found[i]] == [y for _, _, y in ranked]
            assert [h.log_prob for h in found[i]] == pytest.approx([p for _, p, _ in ranked])
            assert [h.score for h in found[i]] == pytest.approx([score for score, _, _ in ranked])


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy_search(kind):
    model, (source, mask) = sharp(kind), sources()
    found = beam_search(model, source, mask, beam=1, max_length=9)
    with torch.no_grad():
        for i in range(len(source)):
            row = slice(i, i + 1)
            (best,) = found[i]
            assert best.tokens == greedy(model, source[row], mask[row], 9)
            assert [best.log_prob] == pytest.approx(log_probs(model, source[row], mask[row], [best.tokens]))
    assert len({tuple(h[0].tokens) for h in found}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_mixed_lengths_is_one_by_one(kind):
    model, (source, mask) = sharp(kind), sources()
    together = beam_search(model, source, mask, beam=3, n_best=3)
    for i, n in enumerate(mask.sum(1).tolist()):
        (alone,) = beam_search(model, source[i : i + 1, :n], None, beam=3, n_best=3)
        assert [h.tokens for h in alone] == [h.tokens for h in together[i]]
        assert [h.log_prob for h in alone] == pytest.approx([h.log_prob for h in together[i]])


class Counting:
    """Counts the rows that go through the decoder."""

    def __init__(self, model):
        self.model, self.rows, self.steps, self.sentences = model, 0, 0, 0

    def encode(self, source, mask):
        self.sentences += len(source)
        return self.model.encode(source, mask)

    def step(self, token, state):
        self.rows += len(token)
        self.steps += 1
        return self.model.step(token, state)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0, -0.5])
@pytest.mark.parametrize("n_best", [1, 3])
def test_stopping_early_changes_nothing_but_the_time(alpha, n_best):
    model, (source, mask) = sharp("linear"), sources()
    how = {"beam": 4, "n_best": n_best, "length_penalty": alpha, "max_length": 12}
    early, late = Counting(model), Counting(model)
    assert beam_search(early, source, mask, **how) == beam_search(late, source, mask, early_stop=False, **how)
    assert early.sentences == len(source)
    assert early.rows <= late.rows
    if alpha <= 0.6 and n_best == 1:
        assert early.rows < late.rows
    assert late.rows <= late.steps * 4 * len(source)


def test_nothing_is_longer_than_it_may_be():
    model, (source, mask) = make("linear"), sources()
    model.logits = lambda hidden: torch.zeros(*hidden.shape[:-1], V).double().index_fill(-1, torch.tensor([EOS]), -50.0)
    for hypotheses, n in zip(beam_search(model, source, mask, beam=2), mask.sum(1).tolist(), strict=True):
        assert len(hypotheses[0].tokens) == n + EXTRA_LENGTH - 1
    assert [len(h[0].tokens) for h in beam_search(model, source, mask, beam=2, max_length=1)] == [0] * 4


def test_specials_are_never_written():
    model, (source, mask) = make("softmax"), sources()
    model.logits = lambda hidden: torch.zeros(*hidden.shape[:-1], V).double().index_fill(-1, torch.tensor([0, 1]), 9.0)
    for hypotheses in beam_search(model, source, mask, beam=3, n_best=3, max_length=5):
        assert not {PAD, BOS, EOS} & {token for h in hypotheses for token in h.tokens}


def test_a_broken_model_is_reported():
    model, (source, mask) = make("linear"), sources()
    torch.nn.init.constant_(model.embedding.weight, torch.nan)
    with pytest.raises(ValueError, match="weights are broken"):
        beam_search(model, source, mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam must be at least 1"),
        ({"beam": 2, "n_best": 3}, "from 1 to beam = 2, got 3"),
        ({"length_penalty": float("nan")}, "finite"),
        ({"max_length": 0}, "at least 1 token"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Search(**options)
