"""What is kept for the backward pass: the inputs and one state per chunk, not one state per step."""

import pytest
import torch

from fastweights.ops.chunked import chunk_length
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
