"""Training translation models: every attention learns, stops and goes on; losses, BLEU, and what is refused."""

import json
import math
import os
import signal
import sys

import pytest
import torch

from fastweights.data.pairs.bpe import BOS, EOS
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.inference.translate import translate
from fastweights.models.translation_config import ATTENTIONS
from fastweights.training.engine.loop import train
from fastweights.training.engine.optim import learning_rate
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import TranslationRun, keep_tokenizer
from fastweights.training.runs.signals import Interrupted
from fastweights.training.tasks.bleu import bleu
from fastweights.training.tasks.translation import TranslationTask, assemble_translation, plan_translation
from tests.data.pair_files import write_set
from tests.training.small_pairs import SMALL, run, small_pairs, small_translation
from tests.training.tiny import losses, quiet


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_pairs(tmp_path_factory.mktemp("translation"))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_learns(corpus, tmp_path, attention):
    result = run(corpus, tmp_path, attention, steps=30, eval_every=None)
    curve = [loss for _, loss in losses(tmp_path)]
    assert len(curve) == 30 and sum(curve[-5:]) < 0.8 * sum(curve[:5])
    assert result.finished and set(result.best) == {"loss", "ppl", "bleu"}
    assert result.best["ppl"] == pytest.approx(math.exp(result.best["loss"]))


def test_learns_to_copy_a_word(tmp_path):
    """One word to one word: a model that reads the source translates all of them."""
    words = [(f"w{n}", f"v{n}") for n in range(8)]
    for split in ("train", "valid"):
        write_set(tmp_path / "files", split, [(" ".join([a] * 4), " ".join([b] * 4)) for a, b in words])
    prepare("parallel", tmp_path / "files", tmp_path / "pairs", vocab=300)
    pairs = ParallelCorpus.load(tmp_path / "pairs")
    settings = {"steps": 140, "eval_every": 140, "log_every": 70, "lr": 0.02, "max_tokens": 80}
    settings |= {"label_smoothing": 0.0, "bleu_sentences": 8}
    assert run(pairs, tmp_path / "run", "linear", **settings).best["bleu"] == pytest.approx(100)


class Stops(TranslationTask):
    """Gets a signal while its eighth batch is made."""

    def batch(self, index, rank, world):
        if index == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(index, rank, world)


def test_a_run_in_two_stretches_has_the_log_of_one(corpus, tmp_path):
    settings = {"attention": "performer", "dropout": 0.1, "accumulate": 2}
    run(corpus, tmp_path / "whole", **settings)
    task, _ = small_translation(corpus, **settings)
    task.__class__ = Stops
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "parts", task=task, **settings)
    torch.manual_seed(99)
    run(corpus, tmp_path / "parts", **settings)
    for kind in ("train", "valid"):
        assert losses(tmp_path / "parts", kind) == losses(tmp_path / "whole", kind)
    assert losses(tmp_path / "parts", "valid", "bleu") == losses(tmp_path / "whole", "valid", "bleu")


def test_the_best_checkpoint_has_the_best_bleu(corpus, tmp_path, monkeypatch):
    scores = iter([3.0, 9.0, 5.0])
    task, config = small_translation(corpus, eval_every=4)
    monkeypatch.setattr(task, "_bleu", lambda model: bleu(["a"], ["a"])._replace(score=next(scores)))
    result = train(task, config, tmp_path, console=quiet())
    assert result.best["bleu"] == 9.0 and result.validation["bleu"] == 5.0
    assert TranslationRun.open(tmp_path).load("best")[1].step == 8
    assert TranslationRun.open(tmp_path).load("last")[1].step == 12


def test_the_loss_is_a_mean_over_target_tokens(corpus):
    task, _ = small_translation(corpus, dropout=0.0)
    model = task.build().double()
    batch = task.batch(0, 0, 1)
    found = task.loss(model, batch, None)
    nll = smooth = 0.0
    for i in range(len(batch.source)):
        source, words = batch.source[i][batch.source_mask[i]], batch.target_out[i][batch.target_mask[i]]
        assert words[-1] == EOS
        target = torch.cat([torch.tensor([BOS]), words[:-1]])
        log_p = model(source.unsqueeze(0), None, target.unsqueeze(0))[0].log_softmax(-1)
        nll -= log_p.gather(1, words.unsqueeze(1)).sum()
        smooth -= log_p.mean(-1).sum()
    tokens = int(batch.target_mask.sum())
    assert found.metrics["tokens"] == tokens == batch.target_mask.sum()
    torch.testing.assert_close(found.metrics["nll"], (nll / tokens).detach())
    torch.testing.assert_close(found.loss, (0.9 * nll + 0.1 * smooth) / tokens)


def test_a_process_without_pairs_adds_nothing(corpus):
    task, _ = small_translation(corpus)
    model, batch = task.build(), task.batch(0, 0, 1)
    empty = batch._replace(target_mask=torch.zeros_like(batch.target_mask))
    outcome = task.loss(model, empty, None)
    outcome.loss.backward()
    assert outcome.loss == outcome.metrics["tokens"] == 0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_validation_scores_all_and_translates_a_part(corpus):
    task, _ = small_translation(corpus, bleu_sentences=5)
    model, valid = task.build().eval(), corpus.split("valid")
    with torch.no_grad():
        found = task.validate(model)
        whole = valid.batches(10_000, shuffle=False)
        assert len(whole) == 1
        outcome = task.loss(model, whole.batch_at(0), None)
    assert found["loss"] == pytest.approx(float(outcome.metrics["nll"]), rel=1e-5)
    texts = translate(model, corpus.tokenizer, valid.sources[:5], beam=1)
    assert found["bleu"] == bleu(texts, valid.targets[:5]).score
    assert "bleu" not in small_translation(corpus, bleu_sentences=0)[0].validate(model)


def test_bleu_is_that_of_sacrebleu():
    lines = ["The cat sits on the mat, quietly.", "Grüße aus Wien an alle!"]
    perfect = bleu(lines, lines)
    assert perfect.score == pytest.approx(100)
    assert "tok:13a" in perfect.signature and "version:" in perfect.signature
    # By hand: of the hypothesis' n-grams 4/5, 3/4, 2/3 and 1/2 are right, and it is as long as the reference.
    expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert bleu(["a b c d e"], ["a b c d f"]).score == pytest.approx(expected)
    with pytest.raises(ValueError, match="2 translations cannot be scored against 1"):
        bleu(lines, lines[:1])
    with pytest.raises(ValueError, match="nothing to score"):
        bleu([], [])


def test_without_sacrebleu_it_is_said_before_the_training(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r"pip install 'fastweights\[mt\]'"):
        small_translation(corpus)
    assert small_translation(corpus, bleu_sentences=0)[0].score.name == "loss"


def test_what_is_not_given_follows_from_what_is(corpus):
    task, config = small_translation(corpus, steps=50)
    assert (config.warmup, config.schedule, config.betas) == (5, "cosine", (0.9, 0.98))
    assert task.model.vocab_size == corpus.tokenizer.size and task.score == ("bleu", True)
    big = plan_translation(100, preset="big", attention="performer", features=128)
    assert (big.training.accumulate, big.training.warmup, big.task["max_tokens"]) == (16, 4000, 10_752)
    assert big.training.schedule == "inverse_sqrt" and big.training.eps == 1e-9
    assert learning_rate(big.training, 16_000) == pytest.approx(5e-4 / 2)
    assert big.model.attentions == ("performer",) * 3 and big.model.d_dot("performer") == 256
    assert plan_translation(100, preset="big", steps=100, warmup=7, accumulate=2).training.accumulate == 2
    # A training too short to learn from features that change keeps them, unless it says otherwise.
    short = {"preset": "base", "steps": 2000}
    assert big.model.redraw and not plan_translation(100, attention="performer", **short).model.redraw
    assert not plan_translation(100, cross="performer", **short).model.redraw
    assert plan_translation(100, attention="performer", redraw=True, **short).model.redraw
    assert plan_translation(100, attention="dpfp", **short).model.redraw, "left as it is where nothing is drawn"
    delta = plan_translation(100, preset="tiny", attention="dpfp", rule="delta", cross="softmax").model
    assert (delta.rule, delta.normalization, delta.cross) == ("delta", "sum", "softmax")


def test_describes_itself_for_json(corpus):
    described = small_translation(corpus)[0].describe()
    assert json.loads(json.dumps(described)) == described
    assert str(corpus.folder) not in json.dumps(described)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "tinny"}, "did you mean 'tiny'"),
        ({"attention": "linaer"}, "did you mean 'linear'"),
        ({"encoder": "dpfb"}, "did you mean 'dpfp'"),
        ({"max_token": 12}, "did you mean 'max_tokens'"),
        ({"vocab_size": 12}, "follows from the corpus"),
        ({"precision": "bf16-mixd"}, "did you mean 'bf16-mixed'"),
        ({"nu": 2}, "is for dpfp attention"),
        ({"max_tokens": 10}, "the train pairs of .* max_tokens is 10"),
        ({"max_length": 1}, "the train pairs of .* no pair"),
        ({"label_smoothing": 1.0}, "label_smoothing must be"),
        ({"bleu_beam": 0}, "bleu_beam at least 1"),
        ({"steps": 5, "warmup": 6}, "warmup must be from 0 to steps = 5"),
    ],
)
def test_what_cannot_work_is_refused(corpus, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        assemble_translation(corpus, **{**SMALL, "preset": "tiny", "attention": "linear", **settings})


def test_a_model_for_another_tokenizer_is_refused(corpus):
    model = plan_translation(99, preset="tiny").model
    with pytest.raises(ValueError, match="vocab_size 99, the corpus"):
        TranslationTask(model, corpus, max_tokens=200)


def test_a_run_is_read_back(corpus, tmp_path):
    result = run(corpus, tmp_path / "run")
    opened = TranslationRun.open(tmp_path / "run")
    model, checkpoint = opened.load("best")
    assert checkpoint.scores == result.best and not model.training
    with torch.no_grad():
        assert small_translation(corpus)[0].validate(model)["loss"] == pytest.approx(result.best["loss"], rel=1e-5)
    with pytest.raises(RunError, match="does not come with the corpus"):
        opened.tokenizer()
    keep_tokenizer(tmp_path / "run", corpus.tokenizer)
    assert opened.tokenizer().sha256 == opened.tokenizer(corpus.folder).sha256 == corpus.tokenizer.sha256
    prepare("numbers", None, tmp_path / "numbers", pairs=50, held_out=5)
    with pytest.raises(RunError, match="another tokenizer"):
        opened.corpus(tmp_path / "numbers")
    (tmp_path / "run" / "tokenizer.json").write_bytes((tmp_path / "numbers" / "tokenizer.json").read_bytes())
    assert opened.tokenizer(corpus.folder).sha256 == corpus.tokenizer.sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run"),
        ("{}", "is not the configuration"),
        ('{"task": {"name": "language", "model": {}}}', "'language', not of a translation model"),
        ('{"task": {"name": "translation"}}', "names no model"),
        ('{"task": {"name": "translation", "model": {"wheels": 4}}}', "cannot be used by this version"),
    ],
)
def test_folders_without_a_translation_model(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=message):
        TranslationRun.open(tmp_path)
