"""Schedules in closed form, Adam and clipping against torch's own."""

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from fastweights.training.engine.config import TrainingConfig, plan_training
from fastweights.training.engine.optim import (
    global_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
    step_scaled,
)
from tests.training.tiny import config


def authors_rates(steps, lr, warmup):
    """The rates of the released code, which sets one after each update."""
    rates, current = [], lr
    for done in range(1, steps + 1):
        rates.append(current)
        current = lr * done / warmup if done < warmup else lr * 0.5 * (1 + math.cos(math.pi * done / steps))
    return rates


def test_cosine_is_the_authors_update_by_update():
    settings = config(steps=50, lr=2.5e-4, warmup=8, first_step_full=True)
    assert [learning_rate(settings, t) for t in range(50)] == pytest.approx(authors_rates(50, 2.5e-4, 8), rel=1e-12)


def test_without_the_quirk_only_the_first_step_differs():
    plain, quirk = (config(steps=50, warmup=8, first_step_full=full) for full in (False, True))
    assert learning_rate(quirk, 0) == quirk.lr and learning_rate(plain, 0) == plain.lr / 8
    assert [learning_rate(plain, t) for t in range(1, 50)] == [learning_rate(quirk, t) for t in range(1, 50)]


def test_other_schedules():
    root = config(steps=1000, lr=1.0, warmup=100, schedule="inverse_sqrt")
    assert [learning_rate(root, t) for t in (50, 100, 400)] == pytest.approx([0.5, 1.0, 0.5])
    line = config(steps=1000, lr=1.0, warmup=100, schedule="linear")
    assert [learning_rate(line, t) for t in (50, 100, 550, 1000)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    trapezoid = config(steps=1000, lr=2.0, warmup=100, schedule="trapezoid", cooldown=0.4)
    rates = [learning_rate(trapezoid, t) for t in (50, 100, 600, 800, 999, 1000)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.005, 0.0])
    flat = config(steps=1000, lr=1.0, warmup=0, schedule="constant")
    assert [learning_rate(flat, t) for t in (0, 999)] == [1.0, 1.0]


def models():
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    theirs = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_step_is_clipping_and_adam(fused):
    ours, theirs = models()
    settings = config(clip=0.25)
    optimizer = make_optimizer(ours, settings)
    for group in optimizer.param_groups:
        group["fused"] = fused
    oracle = torch.optim.Adam(theirs.parameters(), lr=settings.lr)
    for _ in range(5):
        x = torch.randn(7, 4)
        for model, chosen in ((ours, optimizer), (theirs, oracle)):
            chosen.zero_grad()
            model(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
        found = global_norm(ours.parameters(), torch.device("cpu"))
        torch.testing.assert_close(found, norm)
        step_scaled(optimizer, optimizer.step, (0.25 / (found + 1e-6)).clamp(max=1.0), torch.zeros(()))
        oracle.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_broken_step_changes_nothing():
    model, same = models()
    optimizer = make_optimizer(model, config())
    (model(torch.ones(1, 4)).sum() * float("nan")).backward()
    step_scaled(optimizer, optimizer.step, torch.ones(()), torch.ones(()))
    for a, b in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_weight_decay_spares_biases_and_norms():
    model, _ = models()
    optimizer = make_optimizer(model, config(weight_decay=0.1))
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(2, 0.1), (4, 0.0)]


def test_rates_of_groups_and_on_the_device():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": [weight], "scale": 0.1}], lr=torch.tensor(1.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate and rate == pytest.approx(0.05)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        make_optimizer(nn.ReLU(), config())


def test_intervals_and_warm_up_follow_the_steps():
    """At least ten validations and fifty lines of log, and a warm-up of at most a tenth where steps are changed."""
    recipe = {"steps": 10_000, "warmup": 700, "clip": 1.0}

    def plan(**changes):
        made = plan_training(recipe, changes, eval_every=400, log_every=50)
        return made.eval_every, made.log_every, made.warmup

    assert plan() == (400, 50, 700)
    assert plan(steps=20_000) == (400, 50, 700) and plan(steps=6_990) == (400, 50, 699)
    assert plan(steps=2_000) == (200, 40, 200) and plan(steps=2_000, warmup=2_000) == (200, 40, 2_000)
    assert plan(steps=5) == (1, 1, 0) and plan(steps=5, eval_every=3, log_every=2, warmup=0) == (3, 2, 0)
    assert plan_training({"steps": 50_000}, {}, eval_every=1, log_every=1).warmup == 2000
    for changes in ({"warmup": -1}, {"warmup": 10_001}):
        with pytest.raises(ValueError, match="warmup must be from 0 to steps = 10000"):
            plan(**changes)
    for changes in ({"steps": 0}, {"lr": 0.0}):
        with pytest.raises(ValueError, match="must be above 0, got 0"):
            plan(**changes)


def test_defaults_are_those_of_the_authors_language_models():
    settings = TrainingConfig(steps=1)
    assert (settings.lr, settings.warmup, settings.schedule, settings.clip) == (2.5e-4, 2000, "cosine", 0.25)
    assert (settings.betas, settings.eps, settings.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert (settings.seed, settings.accumulate, settings.precision) == (1111, 1, "32-true")
    assert (settings.eval_every, settings.log_every, settings.first_step_full) == (4000, 200, False)
    # Of our own: a checkpoint every ten minutes, of which two are kept beside the best.
    assert (settings.checkpoint_every, settings.checkpoint_minutes, settings.keep) == (None, 10.0, 2)
    with pytest.raises(FrozenInstanceError):
        settings.lr = 1.0
    trapezoid, muon = TrainingConfig(steps=1, schedule="trapezoid"), TrainingConfig(steps=1, optimizer="muon")
    assert (trapezoid.cooldown, muon.muon_lr) == (0.2, 0.02)
