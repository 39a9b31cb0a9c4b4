"""Benchmarks measure the same function for every rival, and write down what they measured."""

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import fastweights as fw
from fastweights.benchmarks import lm, lm_agreement, memory, memory_rivals, retrieval, stream, translation
from fastweights.cli import app
from fastweights.data.registry import CORPORA
from fastweights.data.synthetic import training_batches
from fastweights.models.retrieval import half_squared_error
from fastweights.models.translation_presets import PRESETS
from fastweights.training.tasks.retrieval_cell import RetrievalCell, RetrievalConfig
from tests.training.small_text import small_corpus


def record_of(tmp_path, name, *options):
    out = tmp_path / "folder" / f"{name}.json"
    result = CliRunner().invoke(app, ["bench", name, "--repeats", "1", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert {"commit", "hardware", "versions", "seed", "wall_s", "threads"} <= set(record)
    return record


def test_memory_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHAPES", [(1, 8, 1, 4)])
    monkeypatch.setattr(memory, "GEMM_SIDES", (16,))
    monkeypatch.setattr(memory, "TURN_S", 0.0)
    monkeypatch.setattr(memory, "SLEEPY_S", 0.0)
    gemm, *rows = record_of(tmp_path, "memory")["rows"]
    assert set(gemm["flops_per_s"]) == {"float32", "bfloat16"}
    assert [row["rival"] for row in rows] == list(memory_rivals.RIVALS)
    for row in rows:
        missing = memory_rivals.RIVALS[row["rival"]].missing()
        assert row["failure"].endswith(", ".join(missing)) if missing else row["forward_over_cpu"] > 0


def test_retrieval_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "CELLS", [(1, "dpfp-1", 4)])
    rows = record_of(tmp_path, "retrieval")["rows"]
    assert [row["form"] for row in rows] == ["plain", "tables", "ours"]
    assert rows[0]["gain"] == 1


def test_translation_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "LENGTHS", (4, 64))
    monkeypatch.setattr(translation, "SIZES", {"cpu": (16, 2)})
    monkeypatch.setattr(translation, "NEW", 3)
    rows = record_of(tmp_path, "mt", "--preset", "tiny", "--device", "cpu")["rows"]
    assert [(row["source_length"], row["attention"]) for row in rows] == [
        (length, attention) for length in (4, 64) for attention in ("softmax", "linear")
    ]
    assert all(row[name] > 0 for row in rows for name in ("train_tokens_per_s", "encode_ms", "step_ms"))
    assert all(row["words"] == CORPORA["numbers"].options["vocabulary_size"] for row in rows)
    bytes_of = {(row["source_length"], row["attention"]): row["state_bytes"] for row in rows}
    assert bytes_of[4, "linear"] == bytes_of[64, "linear"] and bytes_of[64, "softmax"] > bytes_of[4, "softmax"]


@pytest.mark.parametrize("preset", ["big", "base"])
def test_translation_is_measured_with_the_words_of_its_training(preset, monkeypatch):
    monkeypatch.setitem(PRESETS, preset, partial(PRESETS[preset], d_model=8, n_heads=1, d_ff=8))
    case = translation.TimedDecoder("softmax", 4, preset, "cpu", False)
    words = CORPORA["wmt14"].options["vocabulary_size"]
    assert case.model.config.vocab_size == PRESETS[preset]().vocab_size == words == 32_000


def test_every_translation_model_has_words_to_be_measured_with():
    assert translation.WORDS.keys() == PRESETS.keys()
    assert translation.WORDS["quick"] == translation.WORDS["tiny"] == CORPORA["numbers"].options["vocabulary_size"]


@pytest.mark.parametrize("attention", translation.ATTENTIONS)
def test_a_long_target_is_decoded_piece_by_piece(attention, monkeypatch):
    monkeypatch.setattr(translation, "SIZES", {"cpu": (16, 2)})
    case = translation.TimedDecoder(attention, 9, "tiny", "cpu", False)
    whole = case.step(case.decoded())
    monkeypatch.setattr(translation, "PIECE", 4)
    pieces = case.step(case.decoded())
    for a, b in zip(whole.past.layers, pieces.past.layers, strict=True):
        for name, tensor in a.tensors().items():
            torch.testing.assert_close(b.tensors()[name], tensor)


@pytest.mark.parametrize("name", [name for name, rival in memory_rivals.RIVALS.items() if rival.same])
def test_the_memory_rivals_compute_the_same(name):
    rival = memory_rivals.RIVALS[name]
    if missing := rival.missing():
        pytest.skip(f"not installed: {', '.join(missing)}")
    inputs = memory_rivals.draw((2, 70, 3, 8), rival)
    wide = [x.double() for x in inputs]
    expected, _ = fw.fast_weight_memory(*wide[:3], rule="gated_delta", beta=wide[3], decay=wide[4], backend="reference")
    found = rival.make(inputs, 1)(*inputs)
    assert (found - expected).norm() < (1e-2 if rival.dtype is torch.bfloat16 else 1e-5) * expected.norm()


@pytest.mark.parametrize(("setting", "model"), [(1, "dpfp-2"), (1, "linear"), (2, "dpfp-1-delta"), (2, "schlag2021")])
def test_the_retrieval_forms_compute_the_same(setting, model):
    cell = RetrievalCell(RetrievalConfig(setting=setting, model=model, size=9), dtype=torch.float64)
    (batch,) = training_batches(setting, 9, 1, 3, torch.Generator().manual_seed(0))
    losses = [half_squared_error(read(cell.model, *batch[:3]), batch.targets) for read in retrieval.FORMS.values()]
    gradients = [torch.autograd.grad(loss, cell.parameters) for loss in losses]
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(gradient, gradients[0])


SHORT = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8, "segment": 6, "batch_size": 2}


def test_lm_compares_and_writes_what_it_measured(tmp_path, monkeypatch):
    make = lm.make
    monkeypatch.setattr(lm, "make", lambda *arguments, **changes: make(*arguments, **{**SHORT, **changes}))
    out = tmp_path / "lm.json"
    options = ["--sizes", "tiny", "--models", "delta,transformer", "--ways", "plain,bf16,fast", "--device", "cpu"]
    options += ["--segments", "5", "--steps", "1", "--compared", "2"]
    result = CliRunner().invoke(app, ["bench", "lm", "--out", str(out), *options])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["size"], row["model"], row["segment"], row["data"]) for row in rows] == [
        ("tiny", "delta", 5, "zipf"),
        ("tiny", "transformer", 5, "zipf"),
    ]
    for row in rows:
        assert row["plain"]["words_per_s"] == pytest.approx(10 / (1e-3 * row["plain"]["step_ms"]))
        # A failure is recorded beside what did not fail, and is one of the whole.
        assert "CUDA graph needs a CUDA device" in row["fast"]["failure"]
        assert "CUDA graph needs a CUDA device" in row["agreement"]["failure"]
    assert result.exit_code == 1
    assert "plain" in result.output and "bf16" in result.output


def test_lm_ways_learn_the_same(monkeypatch):
    corpus = lm.random_corpus("tiny")
    make = lm.make
    monkeypatch.setattr(lm, "make", lambda *arguments, **changes: make(*arguments, **{**SHORT, **changes}))
    found = lm.agreement(corpus, "tiny", "delta", ["plain", "bf16"], "cpu", 3)
    assert found["agree"] and 0 < found["largest_difference"]["bf16"] < lm.AGREEMENT
    assert len(set(found["losses"]["plain"])) == 3


def test_stock_parts_learn_too(monkeypatch):
    """PyTorch's softmax over the same words: about log V at first, then less. It is not compared with ours."""
    corpus = lm.random_corpus("tiny")
    monkeypatch.setitem(lm.WAYS, "stock", lm.WAYS["stock"]._replace(settings={"precision": "32-true"}))
    make = lm.make
    changes = {**SHORT, "segment": 32, "warmup": 0, "lr": 0.01}
    monkeypatch.setattr(lm, "make", lambda *arguments, **more: make(*arguments, **{**changes, **more}))
    losses = lm.first_losses(lm.make(corpus, "tiny", "transformer", "stock", "cpu"), 30)
    assert losses[0] > 7 and losses[-1] < losses[0] - 1
    row = lm.case(corpus, "tiny", "transformer", ["plain", "stock"], "cpu", 1, 2)
    assert "agreement" not in row and row["stock"]["words_per_s"] > 0


def test_a_stream_of_fast_weights_has_one_size_and_a_transformer_grows(tmp_path):
    out = tmp_path / "stream.json"
    options = [
        "--size",
        "tiny",
        "--models",
        "delta,transformer",
        "--device",
        "cpu",
        "--pasts",
        "100,3",
        "--threads",
        "1",
    ]
    options += ["--plot", str(tmp_path / "stream.png")]
    result = CliRunner().invoke(app, ["bench", "stream", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "stream.png").read_bytes()[1:4] == b"PNG" and json.loads(out.read_text())["threads"] == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["past"]) for row in rows] == [(m, n) for m in ("delta", "transformer") for n in (3, 100)]
    held = {(row["model"], row["past"]): row["state_bytes"] for row in rows}
    assert held["delta", 3] == held["delta", 100] and held["transformer", 3] < held["transformer", 100]
    assert all(row["ms"] > 0 for row in rows)
    refused = CliRunner().invoke(app, ["bench", "stream", "--pasts", "3,40", "--device", "cpu"])
    assert refused.exit_code == 2 and "more than 51 apart" in refused.output
    refused = CliRunner().invoke(app, ["bench", "stream", "--models", "detla", "--device", "cpu"])
    assert refused.exit_code == 2 and "unknown model 'detla'" in refused.output


def test_a_long_cache_is_made_of_a_shorter_one(monkeypatch):
    monkeypatch.setattr(stream, "READ", 20)
    rows = stream.case("tiny", "transformer", "cpu", [10, 100, 300], False)
    monkeypatch.setattr(stream, "READ", 1000)
    assert [row["state_bytes"] for row in rows] == [
        row["state_bytes"] for row in stream.case("tiny", "transformer", "cpu", [10, 100, 300], False)
    ]


def test_lm_refuses_unknown_names():
    result = CliRunner().invoke(app, ["bench", "lm", "--models", "detla", "--device", "cpu"])
    assert result.exit_code == 2 and "unknown model 'detla'" in result.output


def test_random_words_are_as_frequent_as_in_text():
    words = lm.zipf(267_735, 200_000)
    counts = torch.bucketize(words, torch.tensor([20_000, 40_000, 200_000]), right=True).bincount(minlength=4)
    shares = counts / len(words)
    torch.testing.assert_close(shares, torch.tensor([0.934, 0.031, 0.032, 0.003]), atol=0.01, rtol=0)


AGREEING = {**SHORT, "d_model": 16, "d_ff": 16, "segment": 12, "batch_size": 8, "eval_batch": 4, "lr": 0.02}


@pytest.fixture
def ways(monkeypatch):
    """Ways of training beside those there are: "again", which is plain, and "other", with another loss."""
    make = lm.make
    for name in ("again", "other"):
        monkeypatch.setitem(lm.WAYS, name, lm.WAYS["plain"])

    def make_small(corpus, size, model, way, device, **changes):
        learner = make(corpus, size, model, way, device, **{**AGREEING, **changes})
        if way == "other":
            loss = learner._loss

            def root_mean_square(network, batch, carry):
                found = loss(network, batch, carry)
                nll, _ = network.loss(batch.inputs, batch.targets, None)
                return found._replace(loss=nll.square().mean().sqrt())

            learner._loss = root_mean_square
        return learner

    monkeypatch.setattr(lm, "make", make_small)


def test_lm_agreement_is_exact_for_the_same_computation_and_notices_another(tmp_path, ways):
    corpus = small_corpus(tmp_path)
    found = lm.agreement(corpus, "tiny", "delta", ["plain", "again", "torch", "other"], "cpu", 20, steps=20)
    assert found["largest_difference"]["again"] == 0.0
    assert 0.0 < found["largest_difference"]["torch"] < 1e-4, "another order of the same sums"
    assert found["largest_difference"]["other"] > lm.AGREEMENT and not found["agree"]
    assert found["losses"]["plain"][-1] < found["losses"]["plain"][0] - 0.3, "it has to learn for this to say anything"
    ending = lm_agreement.perplexities(corpus, "tiny", "delta", ["plain", "again", "other"], "cpu", 40)
    assert ending["largest_difference"]["again"] == 0.0
    assert ending["largest_difference"]["other"] > lm_agreement.ENDING and not ending["agree"]


def test_losses_that_are_not_numbers_do_not_agree():
    assert lm.furthest([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert lm.furthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)


def test_lm_agreement_writes_what_it_found(tmp_path, ways):
    small_corpus(tmp_path)
    out = tmp_path / "agreement.json"
    command = ["bench", "lm-agreement", "--corpus", str(tmp_path / "corpus"), "--size", "tiny", "--device", "cpu"]
    command += ["--losses", "12", "--steps", "25", "--batch", "6", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--ways", "plain,bf16"])
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert record["benchmark"] == "lm-agreement" and "commit" in record and "hardware" in record
    assert len(row["losses"]["losses"]["plain"]) == 12 and row["losses"]["agree"]
    assert row["perplexity"]["ways"]["bf16"]["training_curve"][-1][0] == 25
    exact, found = (row["perplexity"]["ways"][way]["valid"]["ppl"] for way in ("plain", "bf16"))
    assert row["perplexity"]["largest_difference"]["bf16"] == pytest.approx(abs(found / exact - 1))
    assert row["agree"] is (result.exit_code == 0) and row["changes"] == {"batch_size": 6}
    assert CliRunner().invoke(app, [*command, "--ways", "plain,other"]).exit_code == 1
    assert json.loads(out.read_text())["rows"][0]["agree"] is False
    alone = CliRunner().invoke(app, [*command, "--ways", "plain"])
    assert alone.exit_code == 2 and "two ways of training" in alone.output
