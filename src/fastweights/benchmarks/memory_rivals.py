"""The rivals that `bench memory` times on the CPU: our backends, and what else computes the gated delta rule there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

import fastweights as fw

Shape = tuple[int, int, int, int]  # B, T, H, D = M
SEED = 0


class MemoryInputs(NamedTuple):
    """Queries and keys of length 1, values (B, T, H, D), the gate beta, and the decays with their logarithms."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    log_decay: Tensor


# From the tensors of the inputs to y.
Run = Callable[..., Tensor]


class Rival(NamedTuple):
    """How a rival is made ready for inputs, and what it can and needs.

    Args:
        make: from inputs and a number of threads to what computes y from such inputs.
        dtype: of q, k and v.
        per_key: whether each key channel has its own decay.
        backward: whether it has gradients.
        needs: modules that must be installed.
        longest: the most tokens that it is given: some would take minutes.
        same: whether it computes the gated delta rule.
    """

    make: Callable[[MemoryInputs, int], Run]
    dtype: torch.dtype = torch.float32
    per_key: bool = False
    backward: bool = True
    needs: tuple[str, ...] = ()
    longest: int = 1 << 30
    same: bool = True

    def missing(self) -> list[str]:
        """List the modules it needs that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def draw(shape: Shape, rival: Rival) -> MemoryInputs:
    """Return the tensors of a shape, the same for every rival but for their type."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    beta, gate = torch.rand(shape[:3], generator=generator), torch.rand(shape, generator=generator)
    # The mean of a key's decays is that of one decay for all of them.
    decay = 0.9 + 0.1 * (gate if rival.per_key else gate[..., 0])
    q, k, v = (x.to(rival.dtype) for x in (normalize(q, dim=-1), normalize(k, dim=-1), v))
    return MemoryInputs(q, k, v, beta, decay, decay.log())


def _ours(backend: str) -> Callable[[MemoryInputs, int], Run]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, _: Tensor) -> Tensor:
        y, _state = fw.fast_weight_memory(q, k, v, rule="gated_delta", beta=beta, decay=decay, backend=backend)
        return y

    return lambda inputs, threads: run


def _transformers(inputs: MemoryInputs, threads: int) -> Run:
    """Take the code in PyTorch that Qwen3-Next falls back to; it divides by the root of D, which we undo."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    root = inputs.q.shape[-1] ** 0.5

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, _: Tensor, log_decay: Tensor) -> Tensor:
        y: Tensor = torch_chunk_gated_delta_rule(root * q, k, v, log_decay, beta)[0]
        return y

    return run


def _onnxruntime(inputs: MemoryInputs, threads: int) -> Run:
    """Make a model of one node, the contributed operator LinearAttention."""
    import onnxruntime
    from onnx import TensorProto, helper

    B, T, H, D = inputs.q.shape
    names = ["query", "key", "value", "past_state", "decay", "beta"]
    options: dict[str, Any] = {"update_rule": "gated_delta", "scale": 1.0, "q_num_heads": H, "kv_num_heads": H}
    taken = [name if name != "past_state" else "" for name in names]
    node = helper.make_node("LinearAttention", taken, ["y", "state"], domain="com.microsoft", **options)
    sizes = {"query": H * D, "key": H * D, "value": H * D, "decay": H, "beta": H}
    graph = helper.make_graph(
        [node],
        "memory",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [B, T, size]) for name, size in sizes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [B, T, H * D])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, _: Tensor, log_decay: Tensor) -> Tensor:
        tensors = {"query": q, "key": k, "value": v, "decay": log_decay, "beta": beta}
        arrays: dict[str, Any] = {name: x.flatten(2).numpy() for name, x in tensors.items()}
        return torch.from_numpy(session.run(["y"], arrays)[0]).view(v.shape)

    return run


def _softmax(inputs: MemoryInputs, threads: int) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


RIVALS = {
    "cpu": Rival(_ours("cpu")),
    "cpu, bfloat16": Rival(_ours("cpu"), dtype=torch.bfloat16),
    "cpu, decay per key": Rival(_ours("cpu"), per_key=True),
    "chunked": Rival(_ours("chunked")),
    "reference": Rival(_ours("reference"), longest=512),
    "transformers": Rival(_transformers, needs=("transformers",)),
    "onnxruntime": Rival(_onnxruntime, backward=False, needs=("onnx", "onnxruntime")),
    "softmax attention": Rival(_softmax, same=False),
}


def steps(rival: Rival, shape: Shape, threads: int) -> dict[str, Callable[[], object]]:
    """Return what is timed of a rival: the forward pass without gradients, and with them where it has any."""
    given = draw(shape, rival)
    run = rival.make(given, threads)

    def forward() -> None:
        with torch.no_grad():
            run(*given)

    leaves = [x.detach().requires_grad_() for x in given]
    dy = torch.ones_like(given.v)

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, dy, allow_unused=True)

    return {"forward": forward, "forward_backward": both} if rival.backward else {"forward": forward}
