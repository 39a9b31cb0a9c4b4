"""The state between calls."""

import pytest
import torch

import fastweights as fw
from tests.ops.calls import random_call


def make():
    return fw.FastWeightState(torch.rand(3, 2, 4, 5, requires_grad=True), torch.rand(3, 2, 4))


def test_detach_cuts_the_graph_and_clone_does_not():
    state = make()
    assert not state.detach().W.requires_grad
    copy = state.clone()
    assert copy.W.requires_grad
    assert copy.W.data_ptr() != state.W.data_ptr()


def test_reorder_forks_and_drops_beams():
    state = make()
    beams = state.reorder(torch.tensor([2, 2, 0]))
    assert torch.equal(beams.W, state.W[[2, 2, 0]])
    assert torch.equal(beams.z, state.z[[2, 2, 0]])


def test_to_and_nbytes():
    state = make()
    assert state.to(torch.float64).W.dtype == torch.float64
    assert state.nbytes == 4 * (3 * 2 * 4 * 5 + 3 * 2 * 4)
    assert fw.FastWeightState(state.W).nbytes == 4 * 3 * 2 * 4 * 5


def test_saved_and_loaded_state_goes_on_as_if_never_left(tmp_path):
    call = random_call("delta", "attention", 2, 30, 2, 4, 3)
    first = call.tokens(0, 17)
    _, *state = first.run()
    path = tmp_path / "state.safetensors"
    fw.FastWeightState(*state).save(path)
    loaded = fw.FastWeightState.load(path)
    rest = call.tokens(17, 30)
    rest.state = (loaded.W, loaded.z)
    assert torch.equal(rest.run()[0], call.run()[0][:, 17:])


def test_load_refuses_another_kind_of_file(tmp_path):
    from safetensors.torch import save_file

    save_file({"k": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds \['k'\], not a FastWeightState"):
        fw.FastWeightState.load(tmp_path / "other.safetensors")
