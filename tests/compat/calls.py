"""Calls of flash-linear-attention's functions, and their recurrences as loops in float64."""

import inspect

import torch
from torch.nn import functional as F

from fastweights.compat import fla

B, T, H, K, V = 2, 11, 2, 5, 3
ADDING = ("gla", "simple_gla", "retention", "linear_attn")
PER_KEY = ("gla", "kda")
NAMES = [name for name in vars(fla) if name.startswith(("chunk_", "fused_")) and not name.endswith("gdn")]


def kind(name):
    return name.removeprefix("fused_recurrent_").removeprefix("fused_chunk_").removeprefix("chunk_")


def takes(name, argument):
    return argument in inspect.signature(getattr(fla, name)).parameters


def inputs(name, dtype=torch.float64, B=B, T=T, HV=H, seed=0):
    """Arguments of the function called `name` without state and bounds."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    n = 2 if kind(name) == "gated_delta_product" else 1
    call = {"q": rand(B, T, H, K), "k": F.normalize(rand(B, n * T, H, K), dim=-1), "v": rand(B, n * T, HV, V)}
    if takes(name, "beta"):
        call["beta"] = rand(B, n * T, HV).sigmoid()
    if takes(name, "g"):
        call["g"] = F.logsigmoid(rand(B, T, HV, K) if kind(name) in PER_KEY else rand(B, T, HV))
    elif takes(name, "gk"):
        call["gk"] = F.logsigmoid(rand(B, T, HV, K))
    if takes(name, "p"):
        call["p"] = F.normalize(rand(B, T, H, K), dim=-1)
    if n > 1:
        call["num_householder"] = n
    if takes(name, "normalize"):
        call["normalize"] = False
    return call


def loop(name, q, k, v, g=None, gk=None, gv=None, beta=None, p=None, num_householder=1, state=None, **_):
    """Return the outputs and the last state of the recurrence, a token and a write at a time, in float64."""
    q, k, v, g, gk, gv, beta, p = (None if x is None else x.double() for x in (q, k, v, g, gk, gv, beta, p))
    groups, n = v.shape[2] // q.shape[2], num_householder
    q, k, p = (None if x is None else x.repeat_interleave(groups, 2) for x in (q, k, p))
    if kind(name) == "retention":
        g = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float64))).log().expand(q.shape[:3])
    S = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
    S = S if state is None else state.double()
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            S = S * (g[:, t, :, :, None] if g.dim() == 4 else g[:, t, :, None, None]).exp()
        if gk is not None:
            S = S * gk[:, t, :, :, None].exp()
        if gv is not None:
            S = S * gv[:, t, :, None, :].exp()
        for i in range(n * t, n * t + n):
            new = v[:, i]
            if kind(name) not in ADDING:
                read = torch.einsum("bhkv,bhk->bhv", S, (k if p is None else p)[:, i])
                new = (new - read) * (1 if beta is None else beta[:, i, :, None])
            S = S + k[:, i, :, :, None] * new[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t] * q.shape[3] ** -0.5))
    return torch.stack(outputs, 1), S


def close(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)


def states(N, HV=H):
    return torch.randn(N, HV, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
