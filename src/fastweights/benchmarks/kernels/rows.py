"""What `bench kernels` times: one row for each shape, with its rule, and what a call of it is given and must give."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fastweights as fw
from fastweights.benchmarks.timing import failure_noted
from fastweights.ops.gpu.self_check import relative_errors
from fastweights.ops.rules import RULES

Shape = tuple[int, int, int, int, int]

SEED = 0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BOTH = tuple(DTYPES)
LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}
# Heads and sequences of a row that are compared with float64.
SAMPLE = 4


class Row(NamedTuple):
    """One shape that is timed.

    Attributes:
        shape: B, T, H, D, M.
        dtypes: what it is timed in; the paper trained in float32, at longer sequences few do.
        rule: its name in `fast_weight_memory`.
        per_key: whether decays are one for each key channel, and not one a head.
    """

    shape: Shape
    dtypes: tuple[str, ...] = ("bfloat16",)
    rule: str = "delta"
    per_key: bool = False

    @property
    def gates(self) -> tuple[str, ...]:
        """Return the names of its gates, in the order in which `inputs` has them."""
        return tuple(f"log_{gate.name}" if gate.fades else gate.name for gate in RULES[self.rule].gates)


ROWS = {
    "paper small": Row((96, 256, 8, 16, 16), BOTH),
    "paper medium": Row((56, 384, 8, 32, 32), BOTH),
    "small, DPFP-1": Row((96, 256, 8, 32, 16), BOTH),
    "2k, heads of 64": Row((8, 2048, 16, 64, 64)),
    "2k, heads of 128": Row((8, 2048, 16, 128, 128)),
    "32k, heads of 64": Row((1, 32768, 16, 64, 64)),
    "32k, heads of 128": Row((1, 32768, 16, 128, 128)),
    "gated delta, 4k, 32 heads of 128": Row((2, 4096, 32, 128, 128), rule="gated_delta"),
    "gated delta, 2k, heads of 128": Row((8, 2048, 16, 128, 128), rule="gated_delta"),
    "gated delta, 32k, heads of 128": Row((1, 32768, 16, 128, 128), rule="gated_delta"),
    "gated delta, 1k, heads of 64": Row((16, 1024, 8, 64, 64), BOTH, rule="gated_delta"),
    "gated delta per key, 4k, 32 heads of 128": Row((2, 4096, 32, 128, 128), rule="gated_delta", per_key=True),
    "gated delta per key, 2k, heads of 64": Row((8, 2048, 16, 64, 64), rule="gated_delta", per_key=True),
    "decay per key, 2k, heads of 64": Row((8, 2048, 16, 64, 64), rule="decay", per_key=True),
    "decay, 2k, heads of 128 and 256": Row((4, 2048, 8, 128, 256), rule="decay"),
    "delta, 4k, 32 heads of 128": Row((2, 4096, 32, 128, 128)),
    "delta, 2k, heads of 256": Row((4, 2048, 4, 256, 256)),
    "delta, images, heads of 64": Row((256, 197, 12, 64, 64)),
}


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, keys of length 1, v, and beta in float32."""
    B, T, H, D, M = shape
    generator = torch.Generator("cuda").manual_seed(SEED)
    q, k, v = (torch.randn(B, T, H, n, device="cuda", generator=generator) for n in (D, D, M))
    k = F.normalize(k, dim=-1)
    beta = torch.rand(B, T, H, device="cuda", generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), beta


def inputs_of(row: Row, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and the gates of a row, in float32, as leaves.

    Decays are as models of this kind begin to train: rates of 1 to 16 a head, times steps of 0.001 to 0.1 a token.
    """
    q, k, v, beta = inputs(row.shape, dtype)
    B, T, H, D, _ = row.shape
    generator = torch.Generator("cuda").manual_seed(SEED + 2)
    sizes = (B, T, H, D) if row.per_key else (B, T, H)
    rates = 1 + 15 * torch.rand(H, *sizes[3:4], device="cuda", generator=generator)
    steps = 10 ** (-3 + 2 * torch.rand(sizes, device="cuda", generator=generator))
    drawn = {"beta": beta, "log_decay": -rates * steps}
    return [x.requires_grad_() for x in (q, k, v, *(drawn[gate] for gate in row.gates))]


def memory(row: Row, backend: str) -> Callable[..., Tensor]:
    """Return the row's rule, computed by that backend of the library, as a function of q, k, v and gates."""

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        named: Any = dict(zip(row.gates, gates, strict=True))
        return fw.fast_weight_memory(q, k, v, rule=row.rule, backend=backend, **named)[0]

    return run


def _sample(x: Tensor) -> Tensor:
    """Return up to `SAMPLE` heads of as many sequences, the first and the last among them, with all of their tokens."""
    batch, heads = (torch.linspace(0, n - 1, min(n, SAMPLE), device=x.device).long() for n in (x.shape[0], x.shape[2]))
    return x[batch][:, :, heads]


def errors(row: Row, function: Callable[..., Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    """Return the relative errors of output and gradients against float64, in the call that is timed, and its seconds.

    Heads and sequences know nothing of each other, so that float64 computes some of them only.
    """
    names = ("y", *(f"d{name}" for name in ("q", "k", "v", *row.gates)))
    generator = torch.Generator("cuda").manual_seed(SEED + 1)
    dy = torch.randn(leaves[2].shape, device="cuda", generator=generator).to(leaves[0].dtype)
    torch.cuda.synchronize()
    result: dict[str, Any] = {}
    start = time.perf_counter()
    y = function(*leaves)
    found = [y]
    with failure_noted(result, "backward_failure"):
        found += torch.autograd.grad(y, leaves, dy)
    torch.cuda.synchronize()
    result["first_call_s"] = time.perf_counter() - start
    exact_leaves = [_sample(x.detach()).double().requires_grad_() for x in leaves]
    y = memory(row, "chunked")(*exact_leaves)
    exact = [y, *torch.autograd.grad(y, exact_leaves, _sample(dy).double())][: len(found)]
    return result | {"errors": relative_errors(names[: len(found)], map(_sample, found), exact)}


def floor_ms(row: Row, dtype: torch.dtype, bytes_per_s: float) -> float:
    """Return the time it takes to read every input and write every output once, forward and backward."""
    B, T, H, D, M = row.shape
    # q, k, v in, y out; then q, k, v, dy in, dq, dk, dv out; and each gate three times.
    gates = sum(D if row.per_key and gate == "log_decay" else 1 for gate in row.gates)
    return 1e3 * B * T * H * ((6 * D + 5 * M) * dtype.itemsize + 3 * 4 * gates) / bytes_per_s
