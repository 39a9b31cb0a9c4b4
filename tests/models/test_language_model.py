"""`LanguageModel`: the equations, one result whichever way the text is cut, states, and that it learns."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from fastweights.layers.mixers import MIXERS, mixer
from fastweights.layers.positions import encode_positions
from fastweights.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from tests.ops.calls import relative_error

V = 23
SMALL = {"vocab_size": V, "d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 10, "init_std": 0.3}
MODELS = {
    "delta": {},
    "delta, both normalisations": {"normalization": "both"},
    "linear": {"rule": "sum", "normalization": "attention"},
    "performer": {"feature_map": "favor", "feature_map_options": {"m": 4, "orthogonal": True}},
    "dpfp": {"feature_map": "dpfp", "feature_map_options": {"nu": 2}, "output_scale": True, "d_head": 4},
    "gated delta": {"rule": "gated_delta", "norm": "pre"},
    "transformer": {"mixer": "softmax", "cutoffs": (5, 11)},
    "transformer, positions": {"mixer": "softmax", "positions": "sinusoid", "position_direction": "forward"},
    "xl": {"mixer": "relative", "mem_len": 50, "tied": False, "cutoffs": (5,)},
    "xl, pre": {"mixer": "relative", "mem_len": 50, "norm": "pre"},
}
KINDS = ("delta", "transformer", "xl")


def make(name="delta", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**{**SMALL, **MODELS[name], **options})).to(dtype).eval()


def text(B=2, T=13):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(T))


def log_probs(model, tokens, state=None):
    hidden, state = model(tokens, state)
    return model.softmax.log_prob(hidden), state


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", KINDS)
def test_is_the_equations_written_out(name, norm):
    model, tokens = make(name, norm=norm, positions="sinusoid"), text()
    norms = lambda layer, x: F.layer_norm(x, (12,), layer.weight, layer.bias)  # noqa: E731
    table = model.softmax.weight if model.embedding is None else model.embedding.weight
    x = table[tokens] * math.sqrt(12)
    x = x + encode_positions(x, "backward")
    for block in model.blocks:
        first, second = (layer for layer in block.feedforward if isinstance(layer, torch.nn.Linear))
        feed = lambda x: second(first(x).relu())  # noqa: E731, B023
        if norm == "post":
            x = norms(block.mixer_norm, x + block.mixer(x)[0])
            x = norms(block.feedforward_norm, x + feed(x))
        else:
            x = x + block.mixer(norms(block.mixer_norm, x))[0]
            x = x + feed(norms(block.feedforward_norm, x))
    x = x if norm == "post" else norms(model.final_norm, x)
    torch.testing.assert_close(model(tokens)[0], x)
    nll, _ = model.loss(tokens, tokens.roll(-1, 1))
    expected = -model.softmax.log_prob(x).gather(-1, tokens.roll(-1, 1).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(nll, expected)


@pytest.mark.parametrize("name", MODELS)
def test_whole_is_segments_is_token_by_token(name):
    model, tokens = make(name), text()
    whole, state = log_probs(model, tokens)
    first, middle = log_probs(model, tokens[:, :5])
    second, split = log_probs(model, tokens[:, 5:], middle)
    stepped, stepping = [], None
    for t in range(tokens.shape[1]):
        p, stepping = model.step(tokens[:, t], stepping)
        stepped.append(p)
    for found, at_end in ((torch.cat([first, second], 1), split), (torch.stack(stepped, 1), stepping)):
        assert relative_error([found], [whole]) < 1e-10
        for a, b in zip(at_end.layers, state.layers, strict=True):
            assert relative_error(list(a.tensors().values()), list(b.tensors().values())) < 1e-10
        assert at_end.position.tolist() == state.position.tolist() == [13, 13]


@pytest.mark.parametrize("name", MODELS)
def test_causality(name):
    model, tokens = make(name), text()
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % V
    before, after = log_probs(model, tokens)[0], log_probs(model, changed)[0]
    torch.testing.assert_close(after[:, :8], before[:, :8], rtol=0, atol=1e-12)
    assert (after[:, 8:] - before[:, 8:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_gradient_reaches_every_parameter(name):
    model = make(name, dropout=0.1).train()
    model.loss(text(4, 31), text(4, 31).roll(-1, 1))[0].mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["delta", "linear", "transformer"])
def test_gradient_flows_into_a_carried_state_until_detached(name):
    model, tokens = make(name), text()
    _, state = model(tokens[:, :5])
    parameters = list(model.blocks[0].mixer.parameters())

    def gradient(past):
        loss = model.loss(tokens[:, 5:-1], tokens[:, 6:], past)[0].sum()
        return torch.autograd.grad(loss, parameters, retain_graph=True)

    whole = torch.autograd.grad(model.loss(tokens[:, :-1], tokens[:, 1:])[0][:, 5:].sum(), parameters)
    assert relative_error(gradient(state), whole) < 1e-10
    assert relative_error(gradient(state.detach()), whole) > 1e-3


def test_tied_weights_are_one_tensor():
    tied, untied = make("delta"), make("delta", tied=False)
    assert untied.n_parameters - tied.n_parameters == V * 12
    assert "embedding.weight" not in tied.state_dict() and "embedding.weight" in untied.state_dict()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    before = tied(tokens)[0]
    with torch.no_grad():
        tied.softmax.weight[0] += torch.linspace(-1, 1, 12)
    assert relative_error([tied(tokens)[0]], [before]) > 1e-3


def test_initialisation():
    config = LanguageModelConfig(vocab_size=500, d_model=64, n_layers=2, d_ff=128, mixer="relative", tied=False)
    model = LanguageModel(config)
    for name, parameter in model.named_parameters():
        mean, std = (1 if "norm.weight" in name else 0), (0 if name.endswith("bias") else 0.02)
        assert abs(parameter.mean() - mean) <= 5 * std / math.sqrt(parameter.numel()), name
        assert parameter.std() == 0 if std == 0 else 0.7 < parameter.std() / std < 1.3, name
    tokens = torch.randint(500, (4, 50))
    nll, _ = model.eval().loss(tokens, torch.randint(500, (4, 50)))
    assert abs(nll.mean() - math.log(500)) < 0.1


@pytest.mark.parametrize("name", KINDS)
def test_dropout_and_modes(name):
    model, tokens = make(name, dropout=0.5), text()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    # One share of the last hidden vectors is dropped before the softmax.
    assert 0.35 < (model(text(8, 50))[0] == 0).double().mean() < 0.65


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_autocast(name):
    model, tokens = make(name, torch.float32, init_std=0.02), text(2, 40)
    exact, _ = model.loss(tokens, tokens.roll(-1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        nll, state = model.loss(tokens[:, :30], tokens.roll(-1, 1)[:, :30])
        more, _ = model.loss(tokens[:, 30:], tokens.roll(-1, 1)[:, 30:], state)
    nll = torch.cat([nll, more], 1)
    nll.mean().backward()
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, exact, rtol=0, atol=0.1)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_compiles_without_graph_breaks(name):
    model, tokens = make(name, torch.float32, n_layers=1), text()
    body = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    hidden, state = model(tokens)
    compiled, _ = body(tokens)
    assert relative_error([compiled], [hidden]) < 1e-5
    expected = model.loss(tokens, tokens, state.detach())[0]
    found = loss(tokens, tokens, state.detach())[0]
    gradients = [torch.autograd.grad(x.sum(), list(model.parameters())) for x in (found, expected)]
    assert relative_error([found, *gradients[0]], [expected, *gradients[1]]) < 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_states(name, tmp_path):
    model, tokens = make(name), text(3)
    _, state = model(tokens[:, :9])
    expected, _ = model.step(tokens[:, 9], state)
    state.save(tmp_path / "state.safetensors")
    loaded = LanguageModelState.load(tmp_path / "state.safetensors")
    assert torch.equal(model.step(tokens[:, 9], loaded)[0], expected)
    order = torch.tensor([2, 0, 2, 1])
    assert relative_error([model.step(tokens[order, 9], state.reorder(order))[0]], [expected[order]]) < 1e-12
    copy = state.clone()
    for layer in copy.layers:
        for tensor in layer.detach().tensors().values():
            tensor.zero_()
    assert torch.equal(model.step(tokens[:, 9], state)[0], expected)
    narrow = state.to(torch.float32)
    assert narrow.position.dtype == torch.int64 and narrow.nbytes < state.nbytes
    assert state.detach().numel * 3 * 8 + 3 * 8 == state.nbytes
    assert not any(x.requires_grad for layer in state.detach().layers for x in layer.tensors().values())


@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_one_token_is_saved_too(name, tmp_path):
    model, token = make(name), torch.tensor([3])
    _, state = model.step(token)
    state.save(tmp_path / "state.safetensors")
    loaded = LanguageModelState.load(tmp_path / "state.safetensors")
    assert torch.equal(model.step(token, loaded)[0], model.step(token, state)[0])


def test_state_of_fast_weights_does_not_grow():
    model, state, sizes = make(), None, set()
    for token in text(2, 20).T:
        _, state = model.step(token, state)
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state.numel == model.state_size() == 2 * 2 * 6 * 6
    assert make("transformer").state_size() == 2 * 2 * 12  # keys and values of one token


def test_files_of_another_kind_are_refused(tmp_path):
    model = make()
    _, state = model(text())
    state.layers[0].save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"not what LanguageModelState\.save writes"):
        LanguageModelState.load(tmp_path / "layer.safetensors")


def test_backward_positions_are_for_whole_windows():
    model, tokens = make("transformer", positions="sinusoid"), text()
    _, state = model(tokens)
    for call in (
        lambda: model(tokens, state),
        lambda: model.step(tokens[:, 0]),
        lambda: model.step(tokens[:, 0], state),
    ):
        with pytest.raises(ValueError, match="position_direction = 'forward'"):
            call()


def test_redrawn_features_cannot_read_a_carried_state():
    model, tokens = make("performer").train(), text()
    _, state = model(tokens)
    with pytest.raises(ValueError, match=r"feature map 'favor' draws .*'redraw': False"):
        model(tokens, state)
    model.eval()(tokens, state)
    make("performer", feature_map_options={"m": 4, "redraw": False}).train()(tokens, state)


def test_memory_length_can_be_changed():
    model, tokens = make("xl"), text(2, 40)
    model.set_memory(7, clamp_len=5)
    _, state = model(tokens)
    assert state.layers[0].inputs.shape == (2, 7, 12)
    assert model.state_size(segment=3) == 2 * (7 + 3) * 2 * 12
    with pytest.raises(ValueError, match="mem_len must be at least 0, got -1"):
        model.set_memory(-1)
    with pytest.raises(ValueError, match="only mixer 'relative' has a memory length, this model's is 'fast_weight'"):
        make().set_memory(7)


@pytest.mark.parametrize("name", MODELS)
def test_config_round_trip(name):
    config = make(name).config
    again = LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert [p.shape for p in LanguageModel(again).parameters()] == [p.shape for p in make(name).parameters()]


def test_errors():
    model, tokens = make(), text()
    with pytest.raises(
        ValueError, match=r"tokens must have shape \(B, T\), got \(2,\); one token per row goes through"
    ):
        model(tokens[:, 0])
    with pytest.raises(
        ValueError, match=r"tokens must have shape \(B,\), got \(2, 13\); whole rows go through forward"
    ):
        model.step(tokens)
    with pytest.raises(TypeError, match=r"tokens must be int64 word numbers, got torch\.float32"):
        model(tokens.float())
    with pytest.raises(ValueError, match="tokens must be words from 0 to vocab_size - 1 = 22, got -1 to 3"):
        model(torch.tensor([[3, -1]]))
    with pytest.raises(ValueError, match="LanguageModelState of 2 layers or None, got 1 layers"):
        model(tokens, make(n_layers=1)(tokens)[1])
    with pytest.raises(ValueError, match="LanguageModelState of 2 layers or None, got FastWeightState"):
        model(tokens, model(tokens)[1].layers[0])
    with pytest.raises(TypeError, match="must be a FastWeightState or None, got KeyValueState"):
        model(tokens, make("transformer")(tokens)[1])


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_share_one_protocol(name):
    layer = mixer(name, 12, 2, 6, **({"mem_len": 9} if name == "relative" else {})).double().eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    y, state = layer(x, None, mask)
    assert y.shape == x.shape and isinstance(state, MIXERS[name].state)
    assert layer.step(x[:, 0], state)[0].shape == (2, 12)
    with pytest.raises(ValueError, match=f"mixer '{name}' has no option 'depth'"):
        mixer(name, 12, 2, 6, depth=3)


def test_learns_a_repeating_text():
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=11, d_model=32, n_layers=2, n_heads=2, d_ff=32, dropout=0.0, output_scale=True
    )
    model = LanguageModel(config)
    stream = torch.randint(11, (1, 9)).repeat(1, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(120):
        nll, _ = model.loss(stream[:, :-1], stream[:, 1:])
        optimizer.zero_grad()
        nll.mean().backward()
        optimizer.step()
    assert nll[:, 9:].mean() < 0.1
    # By itself it goes on with the text, token by token.
    model.eval()
    token, state, said = stream[:, 0], None, []
    for t in range(30):
        p, state = model.step(token, state)
        token = stream[:, t + 1] if t < 12 else p.argmax(-1)
        said.append(token.item())
    assert said == stream[0, 1:31].tolist()
