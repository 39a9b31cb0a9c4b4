"""Training language models: every mixer learns, stops and goes on, and what cannot work is refused.

The golden losses are in golden_losses.json. After a change that is meant to alter them, and a look at why,
`python -m tests.training.tasks.test_language` writes them anew.
"""

import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastweights.models.presets import RECIPES
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import LanguageRun, keep_tokenizer
from fastweights.training.runs.signals import Interrupted
from fastweights.training.tasks.evaluate import Protocol, measure
from fastweights.training.tasks.language import LanguageTask, plan
from tests.training.small_text import MIXERS, run, small_corpus, small_task
from tests.training.tiny import losses

GOLDEN = Path(__file__).parent / "golden_losses.json"
GOLDEN_RUNS = {"delta": {"steps": 20, "dropout": 0.1}, "transformer": {"steps": 20, "dropout": 0.1}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("language"))


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_learns(corpus, tmp_path, mixer):
    result = run(corpus, tmp_path, mixer)
    curve = [loss for _, loss in losses(tmp_path)]
    assert len(curve) == 30 and sum(curve[-5:]) < 0.85 * sum(curve[:5])
    assert result.finished and result.best["ppl"] < 20
    assert result.best["loss"] == min(loss for _, loss in losses(tmp_path, "valid"))


@pytest.mark.parametrize("mixer", ["delta", "linear", "performer"])
def test_learns_with_its_state_carried(corpus, tmp_path, mixer):
    run(corpus, tmp_path, mixer, context="carried")
    curve = [loss for _, loss in losses(tmp_path)]
    assert sum(curve[-5:]) < 0.85 * sum(curve[:5])


class Stops(LanguageTask):
    """Gets a signal while its seventeenth batch is made."""

    def batch(self, index, rank, world):
        if index == 16:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(index, rank, world)


@pytest.mark.parametrize(
    ("mixer", "settings"),
    [
        ("delta", {"context": "carried"}),
        ("performer", {"context": "limited"}),
        ("xl", {"context": "carried"}),
        ("delta", {"order": "shuffled"}),
    ],
)
def test_a_run_in_two_stretches_has_the_log_of_one(corpus, tmp_path, mixer, settings):
    run(corpus, tmp_path / "whole", mixer, **settings)
    task, _ = small_task(corpus, mixer, **settings)
    task.__class__ = Stops
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "parts", mixer, task, **settings)
    torch.manual_seed(99)
    run(corpus, tmp_path / "parts", mixer, **settings)
    for kind in ("train", "valid"):
        assert losses(tmp_path / "parts", kind) == losses(tmp_path / "whole", kind)


@pytest.mark.parametrize("mixer", GOLDEN_RUNS)
def test_golden_losses(corpus, tmp_path, mixer):
    run(corpus, tmp_path, mixer, **GOLDEN_RUNS[mixer])
    expected = json.loads(GOLDEN.read_text())[mixer]
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("context", ["limited", "carried"])
def test_batches_are_the_text_in_order(corpus, context):
    task, _ = small_task(corpus, context=context)
    rows = corpus.train.tokens[: len(corpus.train) // 8 * 8].view(8, -1).long()
    epoch = -(-(rows.shape[1] - 1) // 12)
    for index in (0, 3, epoch + 3):
        inputs, targets, starts, _ = task.batch(index, 0, 1)
        begin = index % epoch * 12
        assert torch.equal(inputs, rows[:, begin : begin + 12])
        assert torch.equal(targets, rows[:, begin + 1 : begin + 13])
        assert starts == (begin == 0 and context == "carried")
    last = task.batch(epoch - 1, 0, 1).inputs
    assert last.shape[1] == (rows.shape[1] - 1) % 12 or last.shape[1] == 12
    parts = [task.batch(5, rank, 4).inputs for rank in range(4)]
    assert torch.equal(torch.cat(parts), task.batch(5, 0, 1).inputs)


@pytest.mark.parametrize("context", ["limited", "carried"])
def test_loss_goes_on_from_the_segment_before(corpus, context):
    task, _ = small_task(corpus, context=context, dropout=0.0)
    model = task.build().double()
    first, second = task.batch(0, 0, 1), task.batch(1, 0, 1)
    before = task.loss(model, first, None)
    after = task.loss(model, second, before.carry)
    assert before.metrics["tokens"] == 8 * 12
    whole, _ = model.loss(torch.cat([first.inputs, second.inputs], 1), torch.cat([first.targets, second.targets], 1))
    alone, _ = model.loss(second.inputs, second.targets)
    expected = whole[:, 12:] if context == "carried" else alone
    torch.testing.assert_close(after.loss, expected.mean())
    assert (before.carry is not None) == (context == "carried")
    # An epoch begins with nothing remembered.
    torch.testing.assert_close(task.loss(model, first, before.carry).loss, before.loss)


@pytest.mark.parametrize("context", ["limited", "carried"])
def test_validation_is_the_protocol_of_segments(corpus, context):
    task, _ = small_task(corpus, context=context)
    model = task.build().eval()
    found = task.validate(model)
    how = Protocol(name="segment", segment=12, batch=4, carry=context == "carried")
    assert found["loss"] == measure(model, corpus.valid, how).loss
    assert found["ppl"] == pytest.approx(torch.tensor(found["loss"]).double().exp().item())


def test_what_is_not_given_follows_from_what_is(corpus):
    task, config = small_task(corpus, steps=50)
    assert (config.warmup, config.lr, config.clip) == (5, 0.02, 0.25)
    assert task.model.vocab_size == corpus.tokenizer.size and task.model.positions == "sinusoid"
    assert small_task(corpus, steps=50, warmup=9, clip=None)[1].warmup == 9
    assert small_task(corpus, "xl")[0].model.mem_len == 12 and small_task(corpus, "xl")[0].carried
    assert small_task(corpus, "xl", mem_len=5)[0].model.mem_len == 5
    carried = small_task(corpus, "performer", context="carried")[0].model
    assert carried.feature_map_options["redraw"] is False and carried.positions == "none"
    assert small_task(corpus, "dpfp", rule="delta", feature_map_options={"nu": 3})[0].model.normalization == "sum"


def test_a_recipe_can_have_any_field_of_training(monkeypatch):
    recipe = {**RECIPES["tiny"], "schedule": "linear", "optimizer": "muon", "muon_lr": 0.03}
    monkeypatch.setitem(RECIPES, "tiny", recipe)
    taken = plan(30, preset="tiny").training
    assert (taken.schedule, taken.optimizer, taken.muon_lr) == ("linear", "muon", 0.03)
    assert plan(30, preset="tiny", muon_lr=0.1, schedule="cosine").training == replace(
        taken, muon_lr=0.1, schedule="cosine"
    )
    assert plan(30, preset="tiny", optimizer="adam").training == replace(taken, optimizer="adam", muon_lr=0.02)
    with pytest.raises(ValueError, match="muon_lr is for optimizer 'muon'"):
        plan(30, preset="tiny", optimizer="adam", muon_lr=0.1)


def test_shuffled_segments_follow_the_seed(corpus):
    same, again, other = (small_task(corpus, order="shuffled", seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(same.batch(5, 0, 1).inputs, again.batch(5, 0, 1).inputs)
    assert not torch.equal(same.batch(5, 0, 1).inputs, other.batch(5, 0, 1).inputs)
    assert same.describe()["order"] == "shuffled" and same.describe() != other.describe()
    # A run from before there was a choice goes on.
    assert not {"order", "seed"} & small_task(corpus)[0].describe().keys()


def test_describes_itself_for_json(corpus):
    described = small_task(corpus)[0].describe()
    assert json.loads(json.dumps(described)) == described
    assert described["corpus"]["fingerprint"] == corpus.fingerprint
    assert str(corpus.folder) not in json.dumps(described)


@pytest.mark.parametrize(
    ("mixer", "settings", "message"),
    [
        ("delta", {"preset": "tinny"}, "did you mean 'tiny'"),
        ("dleta", {}, "did you mean 'delta'"),
        ("delta", {"context": "carreid"}, "did you mean 'carried'"),
        ("delta", {"order": "shufled"}, "did you mean 'shuffled'"),
        ("delta", {"order": "shuffled", "context": "carried"}, "order 'shuffled' leaves none"),
        ("delta", {"order": "shuffled", "batch_size": 10_000}, "the train text of .* take a batch of at most"),
        ("delta", {"rule": "detla"}, "did you mean 'delta'"),
        ("delta", {"normalization": "sums"}, "did you mean 'sum'"),
        ("delta", {"precision": "bf16-mixd"}, "did you mean 'bf16-mixed'"),
        ("delta", {"d_modle": 12}, "did you mean 'd_model'"),
        ("delta", {"vocab_size": 12}, "follows from the corpus"),
        ("delta", {"context": "carried", "positions": "sinusoid"}, "position_direction 'forward'"),
        ("delta", {"feature_map_options": {"nu": 1}}, "does not take"),
        ("delta", {"batch_size": 10_000}, "the train text of .* take a batch of at most"),
        ("delta", {"eval_batch": 10_000}, "the valid text of .* take a batch of at most"),
        ("delta", {"segment": 0}, "segment must be above 0"),
        ("delta", {"steps": 5, "warmup": 6}, "warmup must be from 0 to steps = 5"),
        ("delta", {"mem_len": 5}, "does nothing with mixer 'fast_weight'"),
        ("transformer", {"context": "carried"}, "cannot be carried"),
        ("transformer", {"rule": "sum"}, "does nothing with mixer 'transformer'"),
        ("xl", {"context": "limited"}, "mem_len 0"),
        ("performer", {"context": "carried", "feature_map_options": {"redraw": True}}, "redraw"),
    ],
)
def test_what_cannot_work_is_refused(corpus, mixer, settings, message):
    from fastweights.training.tasks.language import assemble
    from tests.training.small_text import SMALL

    with pytest.raises((ValueError, TypeError), match=message):
        assemble(corpus, mixer=mixer, **{**SMALL, "preset": "tiny", **settings})


def test_a_model_for_another_corpus_is_refused(corpus):
    model = small_task(corpus)[0].model
    other = type(model)(**{**model.to_dict(), "vocab_size": 99})
    with pytest.raises(ValueError, match="99, the corpus"):
        LanguageTask(other, corpus, segment=4, batch_size=2)


def test_a_state_is_not_carried_to_features_drawn_anew(corpus):
    model = small_task(corpus, "performer", context="carried")[0].model
    # As FAVOR+ does where nobody says otherwise.
    redrawing = type(model)(**{**model.to_dict(), "feature_map_options": {"m": 4}})
    with pytest.raises(ValueError, match="'favor' draws new features"):
        LanguageTask(redrawing, corpus, segment=4, batch_size=2, context="carried")


def test_a_run_is_read_back(corpus, tmp_path):
    result = run(corpus, tmp_path / "run")
    opened = LanguageRun.open(tmp_path / "run")
    assert (opened.segment, opened.carried) == (12, False)
    model, checkpoint = opened.load("best")
    assert checkpoint.scores == result.best and not model.training
    assert small_task(corpus)[0].validate(model)["loss"] == pytest.approx(result.best["loss"], rel=1e-6)
    with pytest.raises(RunError, match="does not come with the corpus it was trained on; say with --data"):
        opened.corpus()
    assert opened.corpus(corpus.folder).fingerprint == corpus.fingerprint
    keep_tokenizer(tmp_path / "run", corpus.tokenizer)
    assert opened.tokenizer().words == corpus.tokenizer.words
    # A vocabulary that is not the one of the training must not put words into the model's mouth.
    (tmp_path / "run" / "vocabulary.txt").write_text("other\nwords\n")
    assert opened.tokenizer(corpus.folder).words == corpus.tokenizer.words
    with pytest.raises(RunError, match="does not come with the corpus"):
        opened.tokenizer()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no run"), ("{}", "is not the configuration"), ('{"task": {"name": "retrieval"}}', "'retrieval'")],
)
def test_folders_without_a_language_model(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=message):
        LanguageRun.open(tmp_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        text, found = small_corpus(Path(place)), {}
        for name, chosen in GOLDEN_RUNS.items():
            run(text, Path(place) / name, name, **chosen)
            found[name] = [loss for _, loss in losses(Path(place) / name)]
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


def test_documents_are_part_of_the_run(corpus, tmp_path):
    """A run that forgets at documents differs from one that does not, resumes as such, and is read back as such."""
    run(corpus, tmp_path / "apart", context="carried", documents="paragraphs")
    assert LanguageRun.open(tmp_path / "apart").documents == "paragraphs"
    with pytest.raises(RunError):
        run(corpus, tmp_path / "apart", context="carried")
    with pytest.raises(ValueError, match="forget"):
        small_task(corpus, "xl", documents="paragraphs")
    with pytest.raises(ValueError, match="positions"):
        small_task(corpus, "delta", documents="paragraphs")


def test_the_vocabulary_beside_a_run_is_replaced_with_the_run_alone(corpus, tmp_path):
    kept = tmp_path / corpus.tokenizer.file
    keep_tokenizer(tmp_path, corpus.tokenizer)
    written = kept.read_bytes()
    kept.write_bytes(b"of the run that is there")
    keep_tokenizer(tmp_path, corpus.tokenizer)
    assert kept.read_bytes() == b"of the run that is there"
    keep_tokenizer(tmp_path, corpus.tokenizer, fresh=True)
    assert kept.read_bytes() == written == corpus.tokenizer.dump()
