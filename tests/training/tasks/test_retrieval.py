"""A retrieval cell: the paper's protocol, the limits of its numbers, and when cells are trained in other processes."""

import pytest

from fastweights.training.tasks import retrieval
from fastweights.training.tasks.retrieval_cell import RetrievalConfig, RetrievalResult


def config(**changes):
    return RetrievalConfig(**{"setting": 2, "model": "dpfp-1-delta", "size": 20, **changes})


def test_the_protocol_of_the_paper():
    cell = config()
    assert (cell.d_key, cell.training_batch, cell.entry.lr, cell.target) == (64, 32, 1e-3, 0.001)
    assert (cell.max_steps, cell.eval_every, cell.eval_sequences, cell.patience) == (100_000, 100, 20, 1000)
    assert (cell.seed, cell.read_eps, cell.exact_shortcuts) == (1, 1e-6, True)
    assert not (cell.chunk_mean or cell.orthogonal or cell.redraw_at_eval)
    assert config(model="schlag2021").training_batch == 128 and config(batch=3).training_batch == 3


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [("size", 2, 1), ("read_eps", 0, -1e-9), *[(n, 1, 0) for n in ("d_key", "batch", "max_steps", "query_cap")]],
)
def test_the_least_of_each_number(name, least, below):
    assert getattr(config(**{name: least}), name) == least
    with pytest.raises(ValueError, match=f"{name} must be .*at least {least}, got {below}"):
        config(**{name: below})


def test_what_is_no_number_of_things():
    for name, value in (("size", 2.5), ("batch", 1.5), ("read_eps", float("nan")), ("setting", 3)):
        with pytest.raises(ValueError, match=name):
            config(**{name: value})


@pytest.mark.parametrize(
    ("step", "loss", "stopped"), [(5, 0.001, "target"), (20, 0.3, "patience"), (19, 0.3, ""), (30, 0.1, "max_steps")]
)
def test_each_reason_to_stop_counts_from_its_number_on(step, loss, stopped):
    cell, result = config(patience=10, max_steps=30), RetrievalResult(curve=[(10, 0.2)])
    assert result.observe(cell, step, loss) == bool(stopped) and result.stopped == stopped


@pytest.mark.parametrize(("cells", "jobs", "processes"), [(3, 1, 1), (1, 4, 1), (2, 2, 2), (3, 8, 3), (0, 2, 1)])
def test_processes_are_started_for_several_cells_at_a_time(monkeypatch, cells, jobs, processes):
    started = []

    def in_processes(work, tasks, jobs, on_report):
        started.append(jobs)
        yield from ((number, task.seed) for number, task in enumerate(tasks))

    monkeypatch.setattr(retrieval, "in_processes", in_processes)
    given = [config(seed=seed) for seed in range(cells)]
    assert list(retrieval.train(given, jobs=jobs)) == [(cell, cell.seed) for cell in given]
    assert started == [processes]
