"""Random calls of `fast_weight_memory` against a plain loop in float64 that shares no code with the package.

The loop is written from the paper's equations. A call draws its rule, sizes, dtype, layout in memory, normalisation,
feature map, gates, mask, texts, packed sequences, state and backend; outputs, final state and gradients are compared.
`pytest -m fuzz tests/ops/test_fuzz.py` runs many more calls than the few hundred of every run.
"""

import random
from itertools import pairwise

import pytest
import torch

from fastweights.ops.features import PLAIN, Features
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.rules import RULES
from fastweights.ops.state import FastWeightState
from tests.ops.calls import FAMILY, HERE, gradients, relative_error

# Errors are relative to the norm of a tensor, and counted in roundings of the dtype. Backends sum in float32 at least,
# so those of 16 bits are a few: of mapped features, gates, outputs and gradients. In wider dtypes the conditioning
# shows: some gradients cancel (of one token under attention normalisation, of one feature divided by its sum), and what
# is left of them is roundings, divided by features as small as 1e-3, beside a thousandth of the largest tensor.
ROUNDINGS = {torch.float64: 1e6, torch.float32: 2e5, torch.bfloat16: 16, torch.float16: 16}


def phi(x, features):
    """Map heads as `features` say: none, ELU + 1, ReLU or DPFP, divided by the sum."""
    if features.map == "elu":
        x = torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    elif features.map == "relu":
        x = x.clamp(min=0)
    elif features.map == "silu":
        x = x * x.sigmoid()
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    elif features.map == "dpfp":
        r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1)
        x = torch.cat([r * torch.cat([r[..., -j:], r[..., :-j]], -1) for j in range(1, features.nu + 1)], -1)
    return quotient(x, x.sum(-1, keepdim=True)) if features.sum else x


def quotient(x, by):
    return torch.where(by.abs() > 1e-30, x / torch.where(by.abs() > 1e-30, by, 1), 0)


def memory(rule, q, k, v, gates, W, z, mask, starts):
    """Run Eqs. 1-3, 17-19 and 20-28 for q, k (B, T, H, D), v (B, T, H, M); return y, W and z."""
    outputs = []

    def read(x, W, z):
        value = (x[..., None] * W).sum(-2)
        return value if z is None else quotient(value, (x * z).sum(-1, keepdim=True))

    for t in range(q.shape[1]):
        if starts is not None:
            W = torch.where(starts[:, t, None, None, None], 0, W)
            z = None if z is None else torch.where(starts[:, t, None, None], 0, z)
        old_W, old_z = W, z
        beta, decay = (gates[name][:, t] if name in gates else None for name in ("beta", "decay"))
        beta, decay = (x if x is None or x.dim() == 3 else x[..., None] for x in (beta, decay))
        share = gates["feedback"][:, t, :, None] if "feedback" in gates else 1
        fade = 1 - beta if rule == "gated" else decay
        if fade is not None:
            W, z = fade[..., None] * W, None if z is None else fade * z
        value = v[:, t]
        if rule in ("delta", "gated_delta", "schlag2021", "comba"):
            value = beta * (value - share * read(k[:, t], W, z))
        elif rule == "gated":
            value = beta * value
        W = W + k[:, t, :, :, None] * value[..., None, :]
        z = None if z is None else z + (beta if rule == "gated" else 1) * k[:, t]
        if rule == "fwp1991":
            W = W.tanh()
        elif rule == "schlag2021":
            W = W / W.square().sum((-2, -1), keepdim=True).clamp(min=1).sqrt()
        if mask is not None:
            W = torch.where(mask[:, t, None, None, None], W, old_W)
            z = None if z is None else torch.where(mask[:, t, None, None], z, old_z)
        y = read(q[:, t], W, z)
        outputs.append(y if mask is None else torch.where(mask[:, t, None, None], y, 0))
    return torch.stack(outputs, 1) if outputs else v, W, z


class RandomCall:
    """One call, all of it drawn from a seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.rule = draw.choice(list(RULES))
        self.backend = draw.choice([*HERE, "auto"] if self.rule in FAMILY else ["reference", "auto"])
        self.dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
        self.normalization = draw.choice([None, "attention"])
        T = draw.choice([1, 2, 7, 33, 70])
        B, H, M = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 3, 8, 17])
        d = draw.choice([2, 3, 4, 8])
        names = [("none", 0), ("elu", 0), ("relu", 0), ("silu", 0), ("dpfp", 1), ("dpfp", 2)]
        name, nu = draw.choice(names)
        # ELU makes keys longer than 1, on which the delta rule grows without end unless they are divided by their sum.
        total = draw.random() < 0.7 or (name == "elu" and "beta" in RULES[self.rule].gate_names)
        logits = draw.random() < 0.5
        self.features = PLAIN if draw.random() < 0.4 else Features.named(name, nu, total, logits)
        if self.features.map == "silu":
            # Signed: sums of it may be next to 0.
            self.normalization = None
            self.features = Features.named("silu", logits=logits, l2=True, scale=0.5)
        packed = draw.random() < 0.3
        B = 1 if packed else B
        self.bounds = [0, *sorted(draw.randint(0, T) for _ in range(draw.choice([0, 1, 3]))), T] if packed else None
        N, D = len(self.bounds) - 1 if packed else B, self.features.size(d)
        wide = torch.promote_types(self.dtype, torch.float32)
        raw = torch.rand if self.features.map == "none" else torch.randn
        # The length of a key is about 1.
        long = 1 if self.features.sum else d**-0.5
        self.tensors = {"q": raw(B, T, H, d) * long, "k": raw(B, T, H, d) * long, "v": torch.randn(B, T, H, M)}
        self.decay = draw.choice(["decay", "log_decay"])
        per_key = (D,) if draw.random() < 0.5 else ()
        for gate in RULES[self.rule].gate_names:
            x = torch.rand(B, T, H, *(per_key if gate == "decay" else ())) * 0.9 + (0.1 if gate == "decay" else 0)
            if gate == "decay" and self.decay == "log_decay":
                self.tensors[self.decay] = x.log()
            else:
                self.tensors[gate] = x.logit() if self.features.logits else x
        gate_dtype = draw.choice([self.dtype, wide])
        for key, x in self.tensors.items():
            self.tensors[key] = x.to(self.dtype if key in ("q", "k", "v") else gate_dtype)
        if draw.random() < 0.5:
            self.tensors["W"] = (torch.randn(N, H, D, M) * 0.3).to(wide)
            if self.normalization:
                self.tensors["z"] = torch.rand(N, H, D).to(wide)
        self.layouts = {key: draw.choice(list(LAYOUTS)) for key in self.tensors}
        self.mask = torch.rand(B, T) < 0.8 if draw.random() < 0.3 else None
        self.starts = torch.rand(B, T) < 0.2 if draw.random() < 0.3 else None
        self.state_shape = (N, H, D, M)

    def run(self):
        """Return the package's outputs and gradients."""
        leaves = {key: LAYOUTS[self.layouts[key]](x) for key, x in self.tensors.items()}
        x = {key: view(leaf.requires_grad_()) for key, (leaf, view) in leaves.items()}
        y, state = fast_weight_memory(
            x["q"],
            x["k"],
            x["v"],
            rule=self.rule,
            **{key: x[key] for key in ("beta", "decay", "log_decay", "feedback") if key in x},
            normalization=self.normalization,
            cu_seqlens=None if self.bounds is None else torch.tensor(self.bounds),
            state=FastWeightState(x["W"], x.get("z")) if "W" in x else None,
            backend=self.backend,
            mask=self.mask,
            starts=self.starts,
            features=self.features,
        )
        outputs = [y, *state.tensors().values()]
        grads = gradients(outputs, [leaf for leaf, _ in leaves.values()], exact_in=self.dtype)
        return [*outputs, *(view(grad) for grad, (_, view) in zip(grads, leaves.values(), strict=True))]

    def expected(self):
        """Return the same by the loop, in float64 from the same inputs."""
        x = {key: tensor.double().requires_grad_() for key, tensor in self.tensors.items()}
        q, k = phi(x["q"], self.features) * self.features.scale, phi(x["k"], self.features)
        names = [key for key in RULES[self.rule].gate_names if key in x]
        gates = {key: x[key].sigmoid() if self.features.logits else x[key] for key in names}
        if "log_decay" in x:
            gates["decay"] = x["log_decay"].exp()
        W = x["W"] if "W" in x else torch.zeros(self.state_shape, dtype=torch.float64)
        z = x["z"] if "z" in x else W.new_zeros(W.shape[:3]) if self.normalization else None
        bounds = [0, q.shape[1]] if self.bounds is None else self.bounds
        rows = len(W) // (len(bounds) - 1)
        outputs = []
        for i, (start, end) in enumerate(pairwise(bounds)):
            tokens = [None if t is None else t[:, start:end] for t in (q, k, x["v"], self.mask, self.starts)]
            now = {name: gate[:, start:end] for name, gate in gates.items()}
            states = [None if s is None else s[i * rows : (i + 1) * rows] for s in (W, z)]
            outputs.append(memory(self.rule, *tokens[:3], now, *states, *tokens[3:]))
        y, W, z = zip(*outputs, strict=True)
        found = [torch.cat(y, 1), torch.cat(W), *([torch.cat(z)] if self.normalization else [])]
        return [*found, *gradients(found, list(x.values()), exact_in=self.dtype)]

    def __str__(self):
        shapes = {key: tuple(x.shape) for key, x in self.tensors.items()}
        options = [name for name in ("mask", "starts", "bounds") if getattr(self, name) is not None]
        return f"{self.rule}, {self.backend}, {self.dtype}, {self.normalization}, {self.features}, {shapes}, {options}"


def dense(x):
    return x.clone(), lambda leaf: leaf


def permuted(x):
    return x.transpose(1, 2).contiguous(), lambda leaf: leaf.transpose(1, 2)


def every_other(x):
    return x.repeat_interleave(2, -1), lambda leaf: leaf[..., ::2]


def part_of_a_row(x):
    return torch.cat([x, x, x], -1), lambda leaf: leaf[..., x.shape[-1] : 2 * x.shape[-1]]


# Name -> a tensor in memory, and the view of it that is equal to x.
LAYOUTS = {"dense": dense, "permuted": permuted, "every other": every_other, "part of a row": part_of_a_row}


def check(seed):
    call = RandomCall(seed)
    error = relative_error(call.run(), call.expected())
    bound = ROUNDINGS[call.dtype] * torch.finfo(call.dtype).eps
    assert error < bound, f"seed {seed}: error {error:.2g}, bound {bound:.2g}: {call}"


@pytest.mark.parametrize("block", range(10))
def test_random_calls(block):
    for seed in range(30 * block, 30 * block + 30):
        check(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("block", range(5))
def test_many_random_calls(block):
    for seed in range(1000 * (block + 1), 1000 * (block + 2)):
        check(seed)
