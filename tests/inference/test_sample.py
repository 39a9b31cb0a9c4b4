"""Drawing words: which may come, how often they do, and the same ones for the same seed."""

import pytest
import torch

from fastweights.inference.sample import Sampling, generate
from fastweights.inference.stream import SlidingWindow, Stream
from tests.training.small_text import random_model

P = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)


def chosen(**options):
    """Words that may come, and their probabilities."""
    found = Sampling(**options).probabilities(P.log())
    return {word: pytest.approx(float(p)) for word, p in enumerate(found) if p}


def test_without_options_words_come_as_the_model_has_them():
    torch.testing.assert_close(Sampling().probabilities(P.log()), P)


def test_top_k():
    assert chosen(top_k=2) == {1: 0.4 / 0.65, 3: 0.25 / 0.65}
    assert chosen(top_k=1) == {1: 1.0}
    assert chosen(top_k=99) == dict(enumerate(P.tolist()))


@pytest.mark.parametrize(
    ("p", "words"), [(0.01, {1}), (0.39, {1}), (0.41, {1, 3}), (0.66, {1, 3, 4}), (1.0, set(range(5)))]
)
def test_top_p_takes_the_fewest_words_that_reach_it(p, words):
    total = float(P[list(words)].sum())
    assert chosen(top_p=p) == {word: float(P[word]) / total for word in words}


def test_top_p_counts_among_the_top_k():
    # Of the two, word 1 alone has 0.615.
    assert chosen(top_k=2, top_p=0.6) == {1: 1.0}
    assert set(chosen(top_k=2, top_p=0.62)) == {1, 3}


def test_temperature():
    warm, cold = chosen(temperature=2.0), chosen(temperature=0.5)
    assert warm == {word: float(p**0.5 / P.sqrt().sum()) for word, p in enumerate(P)}
    assert cold == {word: float(p**2 / P.square().sum()) for word, p in enumerate(P)}
    # At a low temperature fewer words reach p.
    assert len(chosen(temperature=0.3, top_p=0.8)) < len(chosen(top_p=0.8))


def test_temperature_0_is_greedy():
    assert chosen(temperature=0.0) == {1: 1.0}
    tied = torch.tensor([0.1, 0.45, 0.45], dtype=torch.float64).log()
    assert Sampling(temperature=0.0).probabilities(tied).tolist() == [0, 1, 0]
    generator = torch.Generator().manual_seed(0)
    assert {Sampling(temperature=0.0, top_p=0.9).draw(P.log(), generator) for _ in range(20)} == {1}


def test_words_are_drawn_as_often_as_they_should():
    generator, sampling = torch.Generator().manual_seed(1), Sampling(top_k=3)
    drawn = torch.tensor([sampling.draw(P.log(), generator) for _ in range(2000)])
    found = torch.bincount(drawn, minlength=5) / 2000
    torch.testing.assert_close(found.double(), sampling.probabilities(P.log()), rtol=0, atol=0.04)


@pytest.mark.parametrize("reader", [Stream, lambda model: SlidingWindow(model, 5)], ids=["stream", "window"])
def test_the_same_seed_gives_the_same_text(reader):
    model = random_model()
    texts = [list(generate(reader(model), [1, 2], 30, Sampling(), seed)) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 30 and all(0 <= word < 23 for word in texts[0])


def test_greedy_text_is_the_most_likely_word_each_time():
    model, text = random_model(), [1, 2]
    for word in generate(Stream(model), [1, 2], 12, Sampling(temperature=0.0)):
        with torch.no_grad():
            hidden, _ = model(torch.tensor([text]))
        assert word == int(model.softmax.log_prob(hidden[0, -1]).argmax())
        text.append(word)


def test_words_come_before_the_next_is_thought_of():
    stream = Stream(random_model())
    words = generate(stream, [1, 2], 3)
    next(words)
    assert stream.position == 2
    next(words)
    assert stream.position == 3
    assert list(generate(stream, [1], 0)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "at most 1"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_broken_weights_are_reported():
    with pytest.raises(ValueError, match="weights are broken"):
        Sampling().draw(torch.full((3,), float("nan")), torch.Generator())
    with pytest.raises(ValueError, match="count must be at least 0"):
        next(generate(Stream(random_model()), [1], -1))
