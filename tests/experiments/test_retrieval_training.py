"""The training of retrieval cells: stopping, seeds, worker processes, and what it learns."""

import math
import multiprocessing
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from fastweights.models.retrieval import MODELS, RetrievalModel
from fastweights.training.tasks import retrieval_cuda
from fastweights.training.tasks.retrieval import train
from fastweights.training.tasks.retrieval_cell import RetrievalCell, RetrievalConfig, RetrievalResult, train_cell


def config(model="dpfp-1", setting=1, size=10, **options):
    return RetrievalConfig(setting=setting, model=model, size=size, **options)


def observe(losses, **options):
    cell, result = config(**options), RetrievalResult()
    for i, loss in enumerate(losses, 1):
        if result.observe(cell, min(100 * i, cell.max_steps), loss):
            break
    return result


def test_stops_at_the_target():
    result = observe([0.5, 0.2, 0.001, 0.1])
    assert (result.stopped, result.steps, result.last_loss, result.best_loss) == ("target", 300, 0.001, 0.001)


@pytest.mark.parametrize(("patience", "steps"), [(1000, 1300), (1100, 1400)])
def test_stops_without_progress(patience, steps):
    result = observe([0.5, 0.4, 0.3, *[0.31] * 3, 0.3, *[0.31] * 30], patience=patience)
    assert (result.stopped, result.steps, result.last_loss, result.best_loss) == ("patience", steps, 0.31, 0.3)


def test_progress_starts_the_count_again():
    result = observe([0.5, *[0.6] * 9, 0.4, *[0.6] * 9, 0.3, *[0.6] * 20])
    assert (result.stopped, result.steps, result.best_loss) == ("patience", 3100, 0.3)


def test_stops_at_the_last_step():
    result = observe([1.0 / i for i in range(1, 9)], max_steps=250)
    assert (result.stopped, result.steps) == ("max_steps", 250)
    assert result.curve == [(100, 1.0), (200, 0.5), (250, pytest.approx(1 / 3))]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_stops_when_not_finite(loss):
    result = observe([0.5, loss])
    assert result.stopped == "diverged"
    assert math.isnan(result.last_loss)
    assert result.best_loss == 0.5


def test_diverged_from_the_start():
    assert math.isnan(observe([math.nan]).best_loss)


def test_evaluates_at_the_last_step_too():
    seen = []
    result = train_cell(config("linear", max_steps=25, eval_every=10), lambda *report: seen.append(report[1:]))
    assert [step for step, _ in result.curve] == [10, 20, 25]
    assert seen == result.curve
    assert (result.stopped, result.steps) == ("max_steps", 25)
    assert result.wall_s > 0


@pytest.mark.parametrize(("setting", "name"), [(1, "favor-64"), (2, "schlag2021-dpfp")])
def test_same_seed_same_result(setting, name):
    first, second, other = (
        train_cell(config(name, setting, 5, seed=seed, max_steps=20, eval_every=10)).curve for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_data_and_weights_are_drawn_from_different_numbers():
    cell = RetrievalCell(config())
    weights = cell.model.embedding.detach().flatten()
    drawn = torch.randn(weights.numel(), generator=cell.generator)
    assert not torch.isclose(weights, drawn).any(0)


def test_processes_give_the_same_results():
    cells = [config("dpfp-1", size=130, max_steps=4, eval_every=2), config("linear"), config("schlag2021", 2, 5)]
    cells = [config(c.model, c.setting, c.size, max_steps=4, eval_every=2) for c in cells]
    seen = []
    here = {cell: result.curve for cell, result in train(cells)}
    there = {cell: result.curve for cell, result in train(cells, jobs=2, on_progress=lambda *r: seen.append(r))}
    assert here == there
    assert sorted((c.model, step, loss) for c, step, loss in seen) == sorted(
        (c.model, step, loss) for c, curve in here.items() for step, loss in curve
    )


def test_closing_the_iterator_ends_the_processes():
    running = train([config("linear", seed=seed, max_steps=10**6, patience=10**6) for seed in range(3)], jobs=2)
    short = train([config("linear", max_steps=2, eval_every=2), config("linear")], jobs=2)
    next(short)
    for iterator in (running, short):
        iterator.close()
    assert not multiprocessing.active_children()


def test_an_error_in_a_process_comes_out():
    # The feature map refuses this nu only when the model is built: 1 <= nu <= 2 d_key - 1.
    cells = [config("dpfp-3", d_key=1, seed=seed) for seed in range(2)]
    with pytest.raises(ValueError, match="nu must be"):
        list(train(cells, jobs=2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "dpfp1"}, "unknown model of setting 1 'dpfp1'; did you mean 'dpfp-1'"),
        ({"model": "dpfp-1-delta"}, "unknown model of setting 1"),
        ({"setting": 3}, "setting must be one of 1, 2, got 3"),
        ({"size": 1}, "size must be a whole number of at least 2, got 1"),
        ({"size": 20.0}, "size must be a whole number"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"eval_every": -5}, "eval_every must be"),
        ({"read_eps": math.nan}, "read_eps must be at least 0"),
    ],
)
def test_bad_configs(arguments, message):
    with pytest.raises(ValueError, match=message):
        config(**arguments)


def test_bad_jobs():
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        next(train([config()], jobs=0))


def test_the_models_own_batch_and_rate():
    assert config("schlag2021", 2).training_batch == 128
    assert config("schlag2021", 2, batch=16).training_batch == 16
    assert RetrievalCell(config("schlag2021", 2)).optimizer.param_groups[0]["lr"] == 1e-4
    assert RetrievalCell(config("schlag2021", 2, lr=0.1)).optimizer.param_groups[0]["lr"] == 0.1
    assert {name: entry.batch for name, entry in MODELS[1].items()} == dict.fromkeys(MODELS[1], 32)


def test_favor_is_evaluated_with_one_fixed_draw():
    for redraw, same in ((False, True), (True, False)):
        cell = RetrievalCell(config("favor-64", redraw_at_eval=redraw))
        draws = []
        for _ in range(2):
            cell.steps(1)
            trained = cell.model.phi.projection.clone()
            cell.evaluate()
            draws.append(cell.model.phi.projection.clone())
            assert not torch.equal(trained, draws[-1])
        assert torch.equal(*draws) is same


def test_learns_below_capacity_and_not_above():
    below = train_cell(config("dpfp-1", size=20))
    assert below.stopped == "target"
    assert below.steps <= 400
    above = train_cell(config("linear", size=40, d_key=8, max_steps=600))
    assert above.best_loss > 0.2


def test_delta_rule_replaces_what_the_sum_rule_keeps():
    losses = {name: train_cell(config(name, 2, 8, max_steps=600)).best_loss for name in ("dpfp-1-sum", "dpfp-1-delta")}
    assert losses["dpfp-1-delta"] < 0.01
    assert losses["dpfp-1-sum"] > 0.05


@pytest.mark.parametrize(
    ("setting", "name"), [(1, "softmax"), (1, "dpfp-2"), (1, "favor-64"), (2, "linear-delta"), (2, "schlag2021-dpfp")]
)
def test_the_plain_model_learns_what_the_short_cuts_do(setting, name):
    curves = [
        train_cell(config(name, setting, 7, max_steps=40, eval_every=20, exact_shortcuts=exact)).curve
        for exact in (True, False)
    ]
    assert [loss for _, loss in curves[0]] == pytest.approx([loss for _, loss in curves[1]], rel=1e-3)
    assert type(RetrievalCell(config(exact_shortcuts=False)).model) is RetrievalModel


class FakeCell:
    """Stands in for a cell on a GPU: its losses are given, and it is ready at every second look."""

    losses: ClassVar[dict[str, list[float]]]
    most = running = 0

    def __init__(self, config, device, stream):
        self.config, self.stream, self.step, self.looks, self.start = config, stream, 0, 0, 0.0
        self.result, self.given = RetrievalResult(), iter(self.losses[config.model])
        FakeCell.running += 1
        FakeCell.most = max(FakeCell.most, FakeCell.running)

    def advance(self):
        self.step += self.config.eval_every

    @property
    def ready(self):
        self.looks += 1
        return self.looks % 2 == 0

    @property
    def loss(self):
        return next(self.given)

    def close(self):
        FakeCell.running -= 1


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(retrieval_cuda, "GraphedCell", FakeCell)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    FakeCell.most = FakeCell.running = 0
    FakeCell.losses = {"softmax": [0.1, 0.0], "linear": [0.5, 0.4, math.nan], "dpfp-1": [0.2, 0.1, 0.05, 0.0005]}


def test_cells_take_turns_on_a_gpu(fake_gpu):
    seen = []
    configs = [config(model) for model in ("dpfp-1", "softmax", "linear")]
    results = [(c.model, r) for c, r in train(configs, device="cuda", jobs=2, on_progress=lambda *r: seen.append(r))]
    assert [name for name, _ in results] == ["softmax", "dpfp-1", "linear"]
    assert {name: (r.stopped, r.steps) for name, r in results} == {
        "softmax": ("target", 200),
        "dpfp-1": ("target", 400),
        "linear": ("diverged", 300),
    }
    assert (FakeCell.most, FakeCell.running) == (2, 0)
    assert [(c.model, step) for c, step, _ in seen[:3]] == [("dpfp-1", 100), ("softmax", 100), ("dpfp-1", 200)]


def test_closing_the_iterator_frees_the_gpu(fake_gpu):
    iterator = train([config("dpfp-1"), config("softmax")], device="cuda", jobs=2)
    next(iterator)
    assert FakeCell.running == 1
    iterator.close()
    assert FakeCell.running == 0


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({}, 25),
        ({"eval_every": 30, "max_steps": 300}, 15),
        ({"max_steps": 250}, 25),
        ({"max_steps": 130}, 10),
        ({"eval_every": 7, "max_steps": 700}, 7),
        ({"model": "schlag2021", "setting": 2, "size": 20}, 10),
        ({"model": "schlag2021", "setting": 2, "size": 200}, 1),
    ],
)
def test_blocks_of_steps_fill_the_time_between_evaluations(options, block):
    cell = config(**options)
    assert retrieval_cuda._block(cell) == block
    assert cell.eval_every % block == (cell.max_steps % cell.eval_every) % block == 0


def test_what_cannot_be_recorded():
    assert retrieval_cuda._recordable(config("favor-64"))
    assert not retrieval_cuda._recordable(config("favor-64", orthogonal=True))
    assert retrieval_cuda._recordable(config("dpfp-1", orthogonal=True))
    assert not retrieval_cuda._recordable(config("schlag2021", 2, 300))
    assert not retrieval_cuda._recordable(config("dpfp-1", exact_shortcuts=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("setting", "name"), [(1, "dpfp-2"), (1, "favor-64"), (2, "linear-delta"), (2, "schlag2021")])
def test_recorded_steps_are_the_eager_ones(setting, name):
    cell = config(name, setting, 12, eval_every=20, max_steps=40)
    torch.use_deterministic_algorithms(False)
    ((_, recorded),) = train([cell], device="cuda")
    eager = RetrievalCell(cell, "cuda")
    losses = []
    for _ in range(2):
        for _ in range(20 // retrieval_cuda._block(cell)):
            eager.steps(retrieval_cuda._block(cell))
        losses.append(float(eager.evaluate()))
    assert [loss for _, loss in recorded.curve] == pytest.approx(losses, rel=1e-2)
