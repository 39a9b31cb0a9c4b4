"""Results made up for the tests: a training that takes no time, and records with chosen losses."""

import math
from types import SimpleNamespace

from fastweights.experiments.engine import retrieval
from fastweights.experiments.engine.experiment import CellRecord, Results
from fastweights.report import build


def without_plots(monkeypatch):
    """Leave plots out of pages in tests about something else: most of a page's time is theirs."""
    monkeypatch.setattr(build, "draw", lambda experiment, results, key: None)
    monkeypatch.setattr(build, "draw_files", lambda experiment, results: {})


class Training:
    """Stands in for `train` of `fastweights.training.tasks.retrieval`; `trained` lists what it was asked to train."""

    def __init__(self, monkeypatch):
        self.trained = []
        self.stop_after = None
        monkeypatch.setattr(retrieval, "train", self.train)

    def train(self, configs, *, device="cpu", jobs=1, on_progress=None):
        for config in configs:
            if self.stop_after is not None and len(self.trained) >= self.stop_after:
                raise KeyboardInterrupt
            curve = [(step, loss_of(config, step)) for step in range(100, 2001, 100)]
            for step, loss in curve:
                on_progress(config, step, loss)
            self.trained.append((config.model, config.size, config.seed))
            last = curve[-1][1]
            yield (
                config,
                SimpleNamespace(
                    last_loss=last, best_loss=last, steps=2000, curve=curve, stopped="patience", wall_s=1.5
                ),
            )


def capacity(model, d_key):
    kind, *numbers = model.split("-")
    return {"linear": d_key, "dpfp": 2 * d_key * int(numbers[0]) if kind == "dpfp" else 0}.get(kind)


def loss_of(config, step):
    """Losses of the shape the paper reports, with a little of the seed in them."""
    falling = 0.5 * math.exp(-step / 250) * (1 + 0.2 * math.sin(config.seed + step / 90))
    if "favor" in config.model:
        return math.nan if config.setting == 2 else 0.5
    if config.setting == 2:
        floor = {"dpfp-1-sum": 0.1, "schlag2021": 8.0, "schlag2021-dpfp": 0.3}.get(config.model, 0.0006)
    else:
        limit = capacity(config.model, config.d_key)
        floor = 0.5 * max(0.0012, 1 - limit / config.size) if limit else 0.0004
    return falling + floor * (1 + 0.1 * math.sin(7 * config.seed))


def record(model, size, loss, *, seed=1, d_key=64, scale="paper", best=None, steps=1000):
    value = None if math.isnan(loss) else loss
    metrics = {
        "last_loss": value,
        "best_loss": value if best is None else best,
        "steps": steps,
        "curve": [[100, 0.5], [steps, value]],
    }
    config = {"scale": scale, "model": model, "rule": "sum", "size": size, "seed": seed, "d_key": d_key}
    return CellRecord(
        metrics=metrics, wall_s=2.0, config=config, paper=None, commit="abc", hardware="a CPU", versions={"torch": "2"}
    )


def results(losses, **options):
    """Results from {model: {size: loss}}."""
    return Results(
        [record(model, size, loss, **options) for model, row in losses.items() for size, loss in row.items()]
    )
