"""Captured updates: which are captured, that replays see every batch and state, and that they change what others do.

A CUDA graph cannot be had on a CPU. Here `capture` is replaced by one that, like a graph, runs nothing while it records
and knows its inputs by their memory alone.
"""

from contextlib import nullcontext

import pytest
import torch

from fastweights.common.tree import map_tensors, signature, tensors_of
from fastweights.training.engine import capture as captured_module
from fastweights.training.engine import learner
from fastweights.training.engine.capture import PATIENCE, WARMUP_UPDATES, CapturedUpdates, refusal
from fastweights.training.engine.distributed import launch
from fastweights.training.runs.signals import Interrupted
from tests.training.tiny import EPOCH, TinyBatch, TinyTask, config, losses, run

from .test_loop import StopsAt

CPU = torch.device("cpu")


@pytest.fixture
def captured(monkeypatch):
    """Stand-ins for `capture`, with the work that was captured, and for the check of the device."""
    works = []

    def capture(work, pool):
        works.append(work)
        static = []

        def replay():
            # The results of a graph always lie in the same memory.
            result = work()
            if not static:
                static.append(map_tensors(torch.clone, result))
            for place, tensor in zip(tensors_of(static[0]), tensors_of(result), strict=True):
                place.copy_(tensor)
            return static[0]

        return replay

    monkeypatch.setattr(captured_module, "capture", capture)
    monkeypatch.setattr(learner, "refusal", lambda *_: None)
    return works


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("carried", [True, False])
def test_the_same_losses(tmp_path, captured, carried, accumulate):
    settings = {"steps": 4 * EPOCH + 2, "accumulate": accumulate}
    run(tmp_path / "plain", TinyTask(carried=carried), **settings)
    assert not captured
    run(tmp_path / "graphed", TinyTask(carried=carried), graph=True, **settings)
    assert losses(tmp_path / "graphed") == losses(tmp_path / "plain")
    assert losses(tmp_path / "graphed", "valid") == losses(tmp_path / "plain", "valid")
    assert captured


def test_going_on_is_the_same(tmp_path, captured):
    run(tmp_path / "whole", graph=True, steps=30)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", StopsAt(17, 15), graph=True, steps=30)
    torch.manual_seed(99)
    run(tmp_path / "parts", graph=True, steps=30)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_short_batch_runs_as_it_comes(tmp_path, captured):
    run(tmp_path / "plain", TinyTask(ragged=True), steps=18)
    run(tmp_path / "graphed", TinyTask(ragged=True), steps=18, graph=True)
    assert losses(tmp_path / "graphed") == losses(tmp_path / "plain")
    assert not captured


def batch(step, length=3):
    return [TinyBatch(torch.full((2, length), step), torch.full((2, length), -step), False, False)]


def test_what_comes_twice_in_a_row_is_captured(captured):
    """An odd one in between, once an epoch, is never compiled nor captured, and interrupts nothing."""
    how = []

    def update(batches, carry, compiled):
        how.append((batches[0].tokens.shape[1], compiled))
        return {"sum": carry["sum"] + batches[0].tokens.sum()}

    recorder, carry, expected = CapturedUpdates(update, CPU), {"sum": torch.zeros((), dtype=torch.long)}, 0
    for step in range(30):
        length = 2 if step % 10 == 9 else 3
        before, carry = recorder(batch(step, length), carry)
        assert before["sum"] == expected
        expected += 2 * length * step
        assert carry["sum"] == expected
    assert how[: 1 + WARMUP_UPDATES] == [(3, False), *[(3, True)] * WARMUP_UPDATES]
    assert {compiled for length, compiled in how if length == 2} == {False}
    assert len(captured) == 1 and len(how) == 30


def test_each_of_many_shapes_is_captured_when_it_comes_again(captured):
    """In any order; the first of each runs uncompiled, and then those that lead up to its capture."""
    how = []

    def update(batches, carry, compiled):
        length = batches[0].tokens.shape[1]
        how.append((length, compiled))
        return {"sum": carry["sum"] + length * batches[0].tokens[0, 0]}

    recorder, carry = CapturedUpdates(update, CPU, many_shapes=True), {"sum": torch.zeros((), dtype=torch.long)}
    lengths = [1 + step % 3 for step in range(30)]
    for step, length in enumerate(lengths):
        before, carry = recorder(batch(step, length), carry)
        assert before["sum"] == sum(n * i for i, n in enumerate(lengths[:step]))
    assert carry["sum"] == sum(n * i for i, n in enumerate(lengths))
    for length in (1, 2, 3):
        assert [compiled for n, compiled in how if n == length][: 1 + WARMUP_UPDATES] == [False] + [True] * 3
    assert len(captured) == 3


def test_rehearsals_have_the_inputs_of_the_recording(captured):
    """Else the compiler, which goes by how tensors are laid out, would compile in the middle of the recording."""
    seen = []

    def update(batches, carry, compiled):
        seen.append([(x.data_ptr(), x.stride()) for x in tensors_of((batches, carry)) if compiled])
        # Laid out in another way than it came.
        return carry.mT.contiguous().mT + 1

    recorder, carry, text = CapturedUpdates(update, CPU), torch.zeros(3, 4), torch.arange(200).view(2, 100)
    for step in range(WARMUP_UPDATES + 4):
        _, carry = recorder([TinyBatch(*[text[:, step : step + 3]] * 2, False, False)], carry)
    assert (carry == WARMUP_UPDATES + 4).all() and len(captured) == 1
    # Those after the first two, of which the state of the first is laid out as a row.
    assert len({str(places) for places in seen if places}) == 1


def test_updates_that_are_never_alike_are_refused(captured):
    recorder = CapturedUpdates(lambda batches, carry, compiled: None, CPU)
    with pytest.raises(ValueError, match=r"no two in a row.*train without graph"):
        for step in range(PATIENCE + 1):
            recorder(batch(step, 1 + step % 2), None)
    recorder = CapturedUpdates(lambda batches, carry, compiled: None, CPU, many_shapes=True)
    with pytest.raises(ValueError, match="no two had batches of one shape"):
        for step in range(PATIENCE + 1):
            recorder(batch(step, 1 + step), None)


def test_a_signature_is_all_but_the_numbers():
    a, b = batch(1), batch(2)
    assert signature(a) == signature(b) and hash(signature(a)) == hash(signature(b))
    others = [batch(1, 4), [b[0]._replace(starts_epoch=True)], [b[0], b[0]], [{"tokens": b[0].tokens}], (b[0],)]
    others.append([b[0]._replace(tokens=b[0].tokens.float())])
    assert len({signature(x) for x in [a, *others]}) == 1 + len(others)
    state = {"a": [torch.zeros(2), (torch.ones(1), None)]}
    assert [x.numel() for x in tensors_of(state)] == [2, 1]


def test_refusals(tmp_path):
    adam = {"capturable": True}
    cuda = torch.device("cuda")
    assert refusal(cuda, 1, [adam]) is None
    assert "2 processes" in refusal(cuda, 2, [adam])
    assert "not capturable" in refusal(cuda, 1, [adam, {}])
    with pytest.raises(ValueError, match="graph: a CUDA graph needs a CUDA device, and this is cpu; train without it"):
        run(tmp_path, graph=True)
    with pytest.raises(ValueError, match="compile = 'reduce-overhead' the loss alone"):
        config(graph=True, compile="reduce-overhead")
    assert config(graph=True, compile="default").graph


def make_learner(monkeypatch, graph, **changes):
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    settings = config(**changes)
    made = learner.Learner(launch(settings), TinyTask(), settings)
    made._loss_is_graph = graph
    return made


@pytest.mark.parametrize("graph", [False, True])
def test_results_of_a_loss_that_is_a_graph_are_copied(monkeypatch, graph):
    """Its next replay writes to the same memory; of any other loss they are kept where they are."""
    made = make_learner(monkeypatch, graph)
    outcome, _, carry = made._forward(made._batch(0, 0), None, compiled=False)
    assert torch.equal(carry[0].W, outcome.carry[0].W) and not carry[0].W.requires_grad
    assert (carry[0].W.data_ptr() != outcome.carry[0].W.data_ptr()) == graph


@pytest.mark.parametrize(("graph", "accumulate", "copies"), [(True, 3, 1), (True, 1, 0), (False, 3, 0)])
def test_gradients_of_a_loss_that_is_a_graph_are_copied_before_the_next_adds_to_them(
    monkeypatch, graph, accumulate, copies
):
    made, calls, batches = make_learner(monkeypatch, graph, accumulate=accumulate), [], []
    own, forward = made._own_gradients, made._forward

    def watched():
        before = [(p.grad, p.grad.data_ptr()) for p in made._parameters]
        own()
        after = [p.grad for p in made._parameters]
        assert all(torch.equal(old, new) for (old, _), new in zip(before, after, strict=True))
        assert all(place != new.data_ptr() for (_, place), new in zip(before, after, strict=True))
        calls.append(len(batches))

    monkeypatch.setattr(made, "_own_gradients", watched)
    monkeypatch.setattr(made, "_forward", lambda *arguments: batches.append(0) or forward(*arguments))
    made.advance()
    assert calls == [1] * copies


def test_only_what_asks_for_it_runs_compiled(monkeypatch):
    """Validation comes in shapes of its own, each of which would be compiled."""
    made, stances = make_learner(monkeypatch, graph=False), []
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: stances.append(stance) or nullcontext())
    made.validate()
    assert not stances
    made.config = config(compile="default")
    made.call(lambda model: None, compiled=True)
    assert not stances
    made.validate()
    assert stances == ["force_eager"]
