"""Muon: its step from the singular value decomposition, Adam beside it, and that a run with it goes on as any other."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fastweights.training.engine.config import TrainingConfig
from fastweights.training.engine.muon import MOMENTUM, Muon, hidden_weights, orthogonalize
from fastweights.training.engine.optim import make_optimizer, set_learning_rate, step_scaled
from fastweights.training.runs.signals import Interrupted
from tests.training.tiny import TinyBlocks, TinyTask, config, losses, run

from .test_capture import captured  # noqa: F401
from .test_loop import StopsAt

MUON = {"optimizer": "muon", "muon_lr": 0.05}


def decomposed(rows, columns, count=3):
    """Random matrices with singular values from 0.01 to 1, and their decompositions."""
    torch.manual_seed(rows)
    u, _, vt = torch.linalg.svd(torch.randn(count, rows, columns, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(-2, 0, min(rows, columns), dtype=torch.float64)
    return u, vt, u * values @ vt


@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (7, 20), (33, 8)])
def test_the_step_is_orthogonal(rows, columns):
    u, vt, matrices = decomposed(rows, columns)
    found = orthogonalize(matrices)
    inside = u.mT @ found @ vt.mT
    values = inside.diagonal(dim1=1, dim2=2)
    assert values.min() > 0.6 and values.max() < 1.25, "Newton-Schulz brings singular values near 1"
    torch.testing.assert_close(inside, torch.diag_embed(values), msg="the singular vectors stay as they are")
    torch.testing.assert_close(orthogonalize(1e4 * matrices), found)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 24), nn.Linear(24, 3)))


def gradients(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_it_is_torchs_muon_inside_the_blocks_and_its_adam_elsewhere():
    ours, theirs = network(), network()
    optimizer = make_optimizer(ours, config(**MUON, weight_decay=0.1, lr=0.02), [ours[2]])
    matrices = hidden_weights([theirs[2]])
    assert len(matrices) == 2
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1, momentum=MOMENTUM)
    rest = [p for p in theirs.parameters() if all(p is not m for m in matrices)]
    decays = [
        {"params": [p for p in rest if (p.ndim == 2) is wide], "weight_decay": 0.1 * wide} for wide in (True, False)
    ]
    adam = torch.optim.AdamW(decays, lr=0.02)
    for step in range(4):
        for model in (ours, theirs):
            gradients(model, step)
        for chosen in (optimizer, muon, adam):
            chosen.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # torch's own iterates in bfloat16: eight bits of what has moved by 4 x 0.05.
        loose = {"rtol": 0, "atol": 5e-3} if any(b is m for m in matrices) else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(a, b, **loose, msg=name)


def test_each_group_has_its_own_rate():
    model = network()
    optimizer = make_optimizer(model, config(**MUON, lr=0.02), [model[2]])
    set_learning_rate(optimizer, 0.5 * 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.01, 0.025])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 5, 2]
    moved = [p.detach().clone() for p in model.parameters()]
    gradients(model, 0)
    optimizer.step()
    turn = (moved[4] - model[2][0].weight).detach()
    expected = 0.025 * math.sqrt(24 / 6)
    assert torch.linalg.matrix_norm(turn, 2) == pytest.approx(expected, rel=0.25), "singular values are the rate"


def test_clipping_is_a_factor_that_only_the_momentum_sees():
    plain, scaled = network(), network()
    for model, factor in ((plain, 1.0), (scaled, 0.25)):
        optimizer = make_optimizer(model, config(**MUON), [model[2]])
        gradients(model, 0)
        step_scaled(optimizer, optimizer.step, torch.tensor(factor), torch.zeros(()))
        momentum = optimizer.state[model[2][0].weight]["momentum"]
        torch.testing.assert_close(momentum, 0.05 * factor * model[2][0].weight.grad)
    torch.testing.assert_close(plain[2][0].weight, scaled[2][0].weight)


def test_a_broken_step_changes_nothing():
    model = network()
    optimizer = make_optimizer(model, config(**MUON, weight_decay=0.1), [model[2]])
    gradients(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in (*model.parameters(), optimizer.state[model[2][0].weight]["momentum"])]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    step_scaled(optimizer, optimizer.step, torch.ones(()), torch.ones(()))
    after = [*model.parameters(), optimizer.state[model[2][0].weight]["momentum"]]
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=0)


def test_nothing_is_read_back_to_the_host():
    """A number that Python asks for has no value in this mode, and none while a CUDA graph is captured."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (4, 6), (3, 2))]
        ours = Muon([{"params": weights, "muon": True, "weight_decay": 0.1}])
        ours.grad_scale, ours.found_inf = torch.rand(()), torch.rand(())
        theirs = torch.optim.Muon(weights)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = torch.rand(())
        ours.step()
        with pytest.raises(DataDependentOutputException):
            theirs.step()


class StopsBlocks(StopsAt, TinyBlocks):
    pass


def test_going_on_is_bitwise_the_same(tmp_path):
    run(tmp_path / "whole", TinyBlocks(), **MUON)
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", StopsBlocks(7, 15), **MUON)
    torch.manual_seed(99)
    run(tmp_path / "parts", TinyBlocks(), **MUON)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    run(tmp_path / "adam", TinyBlocks())
    assert losses(tmp_path / "adam")[2:] != losses(tmp_path / "whole")[2:]


def test_captured_updates_are_the_same(tmp_path, captured):  # noqa: F811
    run(tmp_path / "plain", TinyBlocks(), steps=22, **MUON)
    run(tmp_path / "graphed", TinyBlocks(), steps=22, graph=True, **MUON)
    assert losses(tmp_path / "graphed") == losses(tmp_path / "plain") and captured


def test_what_cannot_be_turned_is_refused(tmp_path):
    with pytest.raises(ValueError, match="names no blocks of TinyModel; train with optimizer 'adam'"):
        run(tmp_path, TinyTask(), **MUON)


def test_settings_that_do_nothing_are_refused_and_not_described():
    plain = TrainingConfig(steps=10).describe()
    assert not {"optimizer", "muon_lr", "cooldown"} & plain.keys(), "cells are named by this"
    assert {"optimizer": "muon", "muon_lr": 0.02}.items() <= TrainingConfig(
        steps=10, optimizer="muon"
    ).describe().items()
    assert TrainingConfig(steps=10, schedule="trapezoid").describe()["cooldown"] == 0.2
    for changes, message in (
        ({"muon_lr": 0.1}, "muon_lr is for optimizer 'muon'; with 'adam' leave it out"),
        ({"cooldown": 0.1}, "cooldown is for schedule 'trapezoid'; with 'cosine' leave it out"),
        ({"optimizer": "sgd"}, "optimizer must be one of adam, muon, got 'sgd'"),
        ({"optimizer": "muon", "lr": 0.0}, "needs lr and muon_lr above 0"),
        ({"schedule": "trapezoid", "cooldown": 0.0}, "cooldown must be a share"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingConfig(steps=10, **changes)
