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


def test_load_refuses_a_state_without_its_weights(tmp_path):
    from safetensors.torch import save_file

    save_file({"z": torch.zeros(1, 1, 2)}, tmp_path / "z.safetensors")
    with pytest.raises(ValueError, match=r"holds \['z'\], not a FastWeightState .* of which it needs \['W'\]"):
        fw.FastWeightState.load(tmp_path / "z.safetensors")


def test_torch_load_reads_states_as_weights_only(tmp_path):
    state = make().detach()
    torch.save({"memory": state, "empty": fw.FastWeightState(state.W)}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["memory"].W, state.W)
    assert torch.equal(loaded["memory"].z, state.z)
    assert loaded["empty"].z is None


def test_states_are_pytrees():
    from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

    state = make()
    doubled = tree_map(lambda x: 2 * x, state)
    assert isinstance(doubled, fw.FastWeightState)
    assert torch.equal(doubled.z, 2 * state.z)
    leaves, form = tree_flatten(fw.FastWeightState(state.W))
    assert len(leaves) == 1
    assert tree_unflatten(leaves, form).W is state.W
    assert tree_unflatten(leaves, form).z is None


@pytest.mark.slow
def test_a_layer_exports_with_its_state():
    layer = fw.FastWeightAttention(8, 2, rule="gated_delta").eval()
    x, (_, state) = torch.randn(1, 6, 8), layer(torch.randn(1, 6, 8))
    exported = torch.export.export(layer, (x, state.detach()), strict=False).module()
    y, after = exported(x, state.detach())
    wanted, wanted_after = layer(x, state.detach())
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(after.W, wanted_after.W)
