"""What is kept for the backward pass: the inputs and one state per chunk, not one state per step."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights.ops.chunked import chunk_length
from fastweights.ops.features import PLAIN
from fastweights.ops.gpu.memory import autograd
from fastweights.ops.gpu.memory.buffers import Buffer
from fastweights.ops.gpu.memory.signatures import WalkSignature
from fastweights.ops.gpu.memory.strides import addressable, common_strides, strides_of
from fastweights.ops.gpu.memory.variants import LONG, SplitWalk, configuration
from tests.ops.calls import random_call


def bytes_saved(call, backend):
    """Bytes of distinct storages that autograd keeps while the call's graph is alive."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = call.run(backend)
    assert outputs[0].requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("T", [256, 1024, 4096])
def test_chunked_saves_inputs_and_one_state_per_chunk(T):
    B, H, D, M = 1, 2, 64, 48
    call = random_call("delta", None, B, T, H, D, M, torch.float32).requiring_grad()
    C = chunk_length(D, M)
    inputs = T * (2 * D + M + 1)
    states = (T // C + 1) * D * M
    # Some room for the odd scalar; a state per step would be T D M, twenty times as much.
    assert bytes_saved(call, "chunked") <= 4 * B * H * (inputs + states) * 1.1
    assert 10 * (inputs + states) < T * D * M


def test_reference_saves_a_state_per_step():
    """The yardstick of the test above: what autograd keeps when left alone."""
    call = random_call("delta", None, 1, 64, 1, 32, 32, torch.float32).requiring_grad()
    assert bytes_saved(call, "reference") > 4 * 64 * 32 * 32


def test_nothing_is_kept_without_gradients():
    call = random_call("delta", None, 1, 256, 1, 8, 8)
    assert not call.run("chunked")[0].requires_grad


def laid_out(*strides, shape=(2, 5, 3, 4)):
    """A tensor without memory."""
    return torch.empty_strided(shape, strides, device="meta")


def test_kernels_read_inputs_where_they_lie():
    """A copy is made only of features that are apart, of gaps between batches, and of what 32 bits cannot count."""
    taken = {
        "a part of a projection": laid_out(5 * 60, 60, 20, 1),
        "heads before tokens": laid_out(5 * 4, 4, 40, 1),
        "one token for all": laid_out(0, 0, 4, 1),
        "one head for all": laid_out(20, 4, 0, 1),
        "one token a batch": laid_out(99, 7, 4, 1, shape=(2, 1, 3, 4)),
        "one batch": laid_out(7, 12, 4, 1, shape=(1, 5, 3, 4)),
        "as far as 32 bits count": laid_out(5 * (2**24 - 1), 2**24 - 1, 2**29, 1),
    }
    for name, x in taken.items():
        assert addressable(x) is x, name
    copied = {
        "features apart": laid_out(60, 12, 1, 3),
        "a gap between batches": laid_out(72, 12, 4, 1),
        "tokens too far apart": laid_out(5 * 2**24, 2**24, 4, 1),
        "heads too far apart": laid_out(60, 12, 2**31 // 3 + 1, 1),
    }
    for name, x in copied.items():
        assert addressable(x).is_contiguous(), name
    assert strides_of(taken["one token a batch"], taken["one batch"]) == (99, 4, 12, 4)


def test_gates_are_read_with_strides_in_common():
    a, e, other = (laid_out(*strides, shape=(2, 5, 3)) for strides in ((60, 12, 4), (60, 12, 4), (15, 3, 1)))
    assert common_strides((a, None, e)) == ((a, None, e), (12, 4))
    assert common_strides((a, None, e), axis=0) == ((a, None, e), (60, 4))
    for axis, strides in ((1, (3, 1)), (0, (15, 1))):
        gates, found = common_strides((a, other, None), axis)
        assert found == strides and gates[2] is None and gates[0].is_contiguous() and gates[1] is other
    assert common_strides((None, None, None)) == ((None, None, None), (1, 1))


class Peak(TorchDispatchMode):
    """The most bytes that were held at a time by tensors made inside, also where they have no memory."""

    def __init__(self):
        super().__init__()
        self.held, self.bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, torch.Tensor)):
            if storage._cdata not in given:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {name: found for name, found in self.held.items() if not found[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.held.values()))
        return made


@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 5, 1, 2), (2, 64, 2, 16), (0, 4, 3)], ids=str)
def test_buffers_lie_as_kernels_write_them(shape):
    """They are made by an example that has one entry and no strides."""
    made, want = Buffer(shape, torch.float16, torch.device("cpu"))(), torch.empty(shape, dtype=torch.float16)
    assert (made.shape, made.stride(), made.dtype) == (want.shape, want.stride(), want.dtype)
    assert made.untyped_storage().nbytes() == want.untyped_storage().nbytes()


class NoKernel:
    """Stands where a kernel stands, and holds nothing that it is called with."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def test_few_long_sequences_are_handed_to_the_kernels_over_groups(monkeypatch):
    B, T, H, D = 1, 4 * LONG, 2, 64
    q = torch.empty(B, T, H, D, dtype=torch.bfloat16, device="meta")
    gates = (None, torch.empty(B, T, H, device="meta"), None)
    kind = WalkSignature.of(q, q, gates, True, None, configuration(D, D, q.dtype, B * H, T), PLAIN)
    plan = autograd.walk(kind, eager=True, gradients=False).make_plan((q, q, q, *gates), None, q.dtype, True)
    assert type(plan).__name__ == "Groups" and 0 < plan.length < T


def test_kernels_over_groups_hold_nothing_that_is_not_needed(monkeypatch):
    """A slot for each chunk, and no gradient of the states between groups when those of queries and keys are made."""
    pytest.importorskip("triton")
    from fastweights.ops.gpu import launcher
    from fastweights.ops.gpu.memory import grouped as walks
    from fastweights.ops.gpu.memory import plan as launch

    monkeypatch.setattr(launcher, "_planned", {})
    for name in ("prepare_chunks", "walk_forward", "walk_backward", "chunk_gradients"):
        monkeypatch.setattr(launch, name, NoKernel(getattr(launch, name)))
    monkeypatch.setattr(walks, "scan_groups", NoKernel(walks.scan_groups))
    B, T, H, D = 1, 32768, 16, 128
    config, dtype = configuration(D, D, torch.bfloat16, B * H, T), torch.bfloat16
    assert (config.groups, config.chunk, config.step, isinstance(config, SplitWalk)) == (8, 64, 32, True)
    q, k, v = (torch.empty(B, T, H, D, dtype=dtype, device="meta") for _ in range(3))
    gates = (None, torch.empty(B, T, H, device="meta"), None)
    with Peak() as peak:
        tokens = (q, k, v, *gates)
        plan = walks.plan_walks(tokens, None, dtype, True, True, config)
        y, _last, *kept = plan.forward(tokens, None, None, True)
        plan.backward(tokens, y, None, kept, None, False)
    mib = {
        "states before chunks, gradients of those after": 2 * 256,
        "inverses, scores": 2 * 32,
        "y, errors": 2 * 128,
        "dq, dk, dv": 3 * 128,
        "the gate's gradient": 2,
        "what groups make of a state, the last state": 8 + 1,
    }
    assert sum(mib.values()) <= peak.bytes / 2**20 < sum(mib.values()) + 0.01
