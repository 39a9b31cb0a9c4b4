"""Bad input gets an error that names the argument, what it was, and what would work."""

import pytest
import torch

import fastweights as fw
from fastweights.ops.features import Features
from fastweights.ops.linear_attention import read_memory, write_memory
from fastweights.ops.memory import _bounds_hold

q = k = torch.rand(2, 5, 3, 4)
v = torch.rand(2, 5, 3, 6)
beta = torch.rand(2, 5, 3)
bounds = torch.tensor([0, 2, 5])

CASES = {
    "rank": ({"q": q[0]}, ValueError, r"q must have shape \(B, T, H, D\), got \(5, 3, 4\)"),
    "not a tensor": ({"v": [1.0]}, TypeError, "v must be a tensor .* got list"),
    "k and q differ": (
        {"k": k[..., :3]},
        ValueError,
        r"k must have the shape of q, \(2, 5, 3, 4\), got \(2, 5, 3, 3\)",
    ),
    "v too short": ({"v": v[:, :4]}, ValueError, r"v must have shape \(2, 5, 3, M\) .* got \(2, 4, 3, 6\)"),
    "no time": ({"q": q[:, :0], "k": k[:, :0], "v": v[:, :0]}, ValueError, "at least 1"),
    "mixed dtypes": ({"v": v.double()}, TypeError, "share a dtype, got q torch.float32 and v torch.float64"),
    "integers": ({"q": q.long(), "k": k.long(), "v": v.long()}, TypeError, "q has dtype torch.int64; use one of"),
    "missing beta": ({"beta": None}, ValueError, r"rule 'delta' needs beta of shape \(2, 5, 3\), got None"),
    "beta of a rule without": ({"rule": "sum"}, ValueError, r"rule 'sum' has no beta \(it takes no gates\)"),
    "decay of a rule without": ({"decay": beta}, ValueError, r"rule 'delta' has no decay \(it takes beta\)"),
    "beta's shape": ({"beta": beta[..., None]}, ValueError, r"beta must have shape .*\(2, 5, 3\), got \(2, 5, 3, 1\)"),
    "beta's dtype": ({"beta": beta.double()}, TypeError, "beta has dtype torch.float64 beside q of torch.float32"),
    "beta a number": ({"beta": 0.5}, TypeError, "beta must be a tensor of shape"),
    "decay's shape": (
        {"rule": "gated_delta", "decay": beta[..., None]},
        ValueError,
        r"decay must have shape .*\(2, 5, 3\) or \(B, T, H, D\) = \(2, 5, 3, 4\), got \(2, 5, 3, 1\)",
    ),
    "decay twice": (
        {"rule": "gated_delta", "decay": beta, "log_decay": beta},
        ValueError,
        "needs decay of shape .*, not both decay and log_decay",
    ),
    "log_decay of a rule without": ({"log_decay": beta}, ValueError, r"rule 'delta' has no log_decay"),
    "unknown rule": ({"rule": "detla"}, ValueError, "unknown rule 'detla'; did you mean 'delta'"),
    "rule of a wrong type": ({"rule": 3}, TypeError, "rule must be a name, got int"),
    "unknown backend": ({"backend": "chunky"}, ValueError, "unknown backend 'chunky'; did you mean 'chunked'"),
    "unknown normalization": ({"normalization": "sum"}, ValueError, "must be 'attention' or None, got 'sum'"),
    "None as a word": ({"normalization": "None"}, ValueError, "must be 'attention' or None, got 'None'"),
    "state's shape": (
        {"state": fw.FastWeightState(torch.zeros(2, 3, 6, 4))},
        ValueError,
        r"state.W must have shape \(2, 3, 4, 6\) here, got \(2, 3, 6, 4\)",
    ),
    "state's dtype": ({"state": fw.FastWeightState(torch.zeros(2, 3, 4, 6).double())}, TypeError, "state.W must be"),
    "state's device": (
        {"state": fw.FastWeightState(torch.zeros(2, 3, 4, 6, device="meta"))},
        ValueError,
        "state.W is on meta but q on cpu",
    ),
    "state without z": (
        {"state": fw.FastWeightState(torch.zeros(2, 3, 4, 6)), "normalization": "attention"},
        ValueError,
        "state has no z but this call needs one",
    ),
    "state a tensor": ({"state": torch.zeros(2, 3, 4, 6)}, TypeError, "must be a FastWeightState or None, got Tensor"),
    "packed batch": ({"cu_seqlens": bounds}, ValueError, "packed along T with B = 1"),
    "float bounds": ({"cu_seqlens": bounds.float()}, TypeError, "int32 or int64"),
    "mask's dtype": ({"mask": torch.ones(2, 5)}, TypeError, "mask must be a bool tensor"),
    "nu's size": (
        {"features": Features.named("dpfp", nu=8)},
        ValueError,
        r"nu must be at most 2 d - 1 = 7 for heads of d = 4, got 8",
    ),
    "mask's shape": ({"mask": torch.ones(5, 2) > 0}, ValueError, r"mask must have shape \(B, T\) = \(2, 5\), got"),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_errors(case):
    change, error, message = CASES[case]
    arguments = {"q": q, "k": k, "v": v, "rule": "delta", "beta": beta} | change
    with pytest.raises(error, match=message):
        fw.fast_weight_memory(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("wrong", [[0, 3, 6], [1, 5], [0, 4, 2, 5]])
def test_bounds_must_rise_from_0_to_T_at_most(wrong):
    assert not _bounds_hold(torch.tensor(wrong), 5)
    assert all(_bounds_hold(x, 5) for x in (bounds, torch.tensor([0, 0, 5, 5]), torch.tensor([0, 3])))
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T = 5 or less, got \["):
        fw.fast_weight_memory(q[:1], k[:1], v[:1], beta=beta[:1], cu_seqlens=torch.tensor(wrong))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("dpfp", 4, {"nu": 8}), ValueError, r"nu must be a whole number from 1 to 2 d_key - 1 = 7, got 8"),
        (("dpfp", 4, {"nu": 0}), ValueError, "got 0"),
        (("favor", 4, {"m": 0}), ValueError, "m must be a whole number of at least 1, got 0"),
        (("elu", 0, {}), ValueError, "d_key must be a whole number of at least 1, got 0"),
        (("elu", 4, {"nu": 1}), TypeError, "feature map 'elu' does not take"),
        (("dpff", 4, {}), ValueError, "unknown feature map 'dpff'; did you mean 'dpfp'"),
    ],
)
def test_feature_map_errors(arguments, error, message):
    name, d_key, options = arguments
    with pytest.raises(error, match=message):
        fw.feature_map(name, d_key=d_key, **options)


def test_feature_map_names_the_size_it_wants():
    with pytest.raises(ValueError, match=r"expected \(\.\.\., d_key = 4\), got \(2, 5\)"):
        fw.feature_map("elu", d_key=4)(torch.rand(2, 5))


def test_rule_option_errors():
    with pytest.raises(ValueError, match="rule 'delta' has no option 'sigma'"):
        fw.update_rule("delta", sigma="tanh")
    with pytest.raises(ValueError, match="unknown sigma of rule 'fwp1991' 'tahn'; did you mean 'tanh'"):
        fw.update_rule("fwp1991", sigma="tahn")


def test_linear_attention_errors():
    with pytest.raises(ValueError, match="k must agree with q in all but its length"):
        fw.linear_attention(q, k[..., :3], v)
    with pytest.raises(ValueError, match="v must agree with k"):
        fw.linear_attention(q, k, v[:, :2])
    with pytest.raises(ValueError, match="mask must be bool"):
        fw.linear_attention(q, k, v, torch.ones(2, 5))
    with pytest.raises(TypeError, match=r"features must be Features.named\(...\), got 'elu'"):
        fw.linear_attention(q, k, v, features="elu")
    with pytest.raises(ValueError, match=r"state.W must be .* of q \(2, 5, 1, 4\) after its map, got \(2, 3, 4, 6\)"):
        read_memory(q[:, :, :1], write_memory(k, v))
