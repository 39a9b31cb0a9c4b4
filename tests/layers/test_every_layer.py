"""What holds for every layer: a wrong dtype gets a remedy, and layers and models can be pickled and copied."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import save_file

import fastweights as fw
from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.cross_attention import FastWeightCrossAttention, SoftmaxCrossAttention
from fastweights.layers.feedforward import FeedForward
from fastweights.layers.mixers import MIXERS, StackState, mixer

D = 8
SEQUENCE_LAYERS = {
    "fast_weight": lambda **options: fw.FastWeightAttention(D, 2, **options),
    "softmax": lambda **options: fw.SoftmaxAttention(D, 2, **options),
    "relative": lambda **options: fw.RelativeAttention(D, 2, mem_len=3, **options),
}
CROSS_ATTENTIONS = {
    "softmax_cross_attention": lambda: SoftmaxCrossAttention(D, 2),
    "fast_weight_cross_attention": lambda: FastWeightCrossAttention(D, 2),
}
# Every way into a layer, as a function of its input.
CALLS = {
    **SEQUENCE_LAYERS,
    **{f"{name}.step": lambda make=make: token_by_token(make()) for name, make in SEQUENCE_LAYERS.items()},
    **{f"{name}.remember": lambda make=make: make().remember for name, make in CROSS_ATTENTIONS.items()},
    **{name: lambda make=make: read(make()) for name, make in CROSS_ATTENTIONS.items()},
    "feed_forward": lambda: FeedForward(D, 12),
}


def token_by_token(layer):
    return lambda x: layer.step(x[:, 0])


def read(layer):
    return lambda x: layer(x, layer.remember(torch.randn(2, 3, D)))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wrong_dtype_gets_a_remedy(call):
    run, x = call(), torch.ones(2, 3, D)
    run(x)
    wanted = (
        r"^x has dtype torch.float64 but the layer's weights are torch.float32; use x.float\(\) or layer.double\(\)$"
    )
    with pytest.raises(TypeError, match=wanted):
        run(x.double())
    with pytest.raises(TypeError, match=r"^x has dtype torch.int64 .* are torch.float32; use x.float\(\)$"):
        run(x.long())
    with torch.autocast("cpu", torch.bfloat16):
        run(x.bfloat16())


def test_the_remedies_work():
    layer, x = fw.SoftmaxAttention(D, 2).half(), torch.ones(1, 2, D)
    with pytest.raises(TypeError, match=r"use x.half\(\) or layer.float\(\)$"):
        layer(x)
    layer(x.half())
    layer.float()(x)


def test_the_softmax_takes_any_dtype_of_numbers_with_a_point():
    layer, targets = AdaptiveSoftmax(20, D, (5,)), torch.tensor([0, 7])
    for dtype in (torch.float64, torch.bfloat16):
        layer(torch.ones(2, D, dtype=dtype), targets)
    for run in (lambda x: layer(x, targets), layer.log_prob, layer.predict, layer.sample):
        with pytest.raises(TypeError, match=r"^hidden has dtype torch.int32 .*; use hidden.float\(\)$"):
            run(torch.ones(2, D, dtype=torch.int32))


def test_a_replaced_projection_knows_what_it_takes():
    class Quantised(torch.nn.Module):
        def forward(self, x):
            return x.new_zeros(*x.shape[:-1], D, dtype=torch.float32)

    layer = fw.SoftmaxAttention(D, 2)
    layer.query = Quantised()
    layer(torch.ones(1, 2, D))


PICKLED = {
    **SEQUENCE_LAYERS,
    **{f"rule {rule}": lambda rule=rule: fw.FastWeightAttention(D, 2, rule=rule) for rule in fw.list_rules()},
    "rule with an option": lambda: fw.FastWeightAttention(D, 2, rule=fw.update_rule("fwp1991", sigma="identity")),
    "language model": lambda: fw.LanguageModel(
        fw.LanguageModelConfig(vocab_size=11, d_model=D, n_heads=2, n_layers=1, d_ff=8)
    ),
    "translation model": lambda: fw.TranslationModel(
        fw.TranslationModelConfig(vocab_size=11, d_model=D, n_heads=2, encoder_layers=1, decoder_layers=1, d_ff=8)
    ),
    **CROSS_ATTENTIONS,
    "feed_forward": lambda: FeedForward(D, 12),
    "adaptive_softmax": lambda: AdaptiveSoftmax(20, D, (5,)),
    **{f"map {name}": lambda name=name: fw.feature_map(name, D) for name in fw.list_feature_maps()},
}


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_layers_can_be_pickled(make):
    layer, file = make(), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False), copy.deepcopy(layer)):
        assert type(again) is type(layer) and repr(again) == repr(layer)
        for ours, theirs in zip(again.state_dict().items(), layer.state_dict().items(), strict=True):
            assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("make", SEQUENCE_LAYERS.values(), ids=SEQUENCE_LAYERS)
def test_states_are_pytrees_and_load_as_weights_only(make):
    layer, x, file = make(), torch.randn(1, 3, D), io.BytesIO()
    state = layer(x)[1].detach()
    torch.save(state, file)
    file.seek(0)
    same = torch.utils._pytree.tree_map(torch.clone, torch.load(file, weights_only=True))
    assert type(same) is type(state)
    torch.testing.assert_close(layer(x, same)[0], layer(x, state)[0])


def test_the_state_of_a_model_loads_as_weights_only():
    model = PICKLED["language model"]().eval()
    file = io.BytesIO()
    _, state = model(torch.randint(11, (1, 4)))
    torch.save(state.detach(), file)
    file.seek(0)
    same, token = torch.load(file, weights_only=True), torch.randint(11, (1,))
    torch.testing.assert_close(model.step(token, same)[0], model.step(token, state)[0])


def test_mixers_by_name():
    """What the options of language models make of a layer, and how many numbers of the past App. F counts for it."""
    scaled, plain = (mixer("fast_weight", D, 2, 9, output_scale=scale) for scale in (True, False))
    assert (scaled.output_scale, plain.output_scale) == (1 / 3, 1.0)
    softmax = mixer("softmax", D, 2, 9, attention_dropout=0.25)
    relative = mixer("relative", D, 2, 9, mem_len=5, clamp_len=3, attention_dropout=0.25)
    assert (softmax.dropout, relative.dropout, relative.mem_len, relative.clamp_len) == (0.25, 0.25, 5, 3)
    dpfp = mixer("fast_weight", D, 2, 9, feature_map="dpfp", feature_map_options={"nu": 2})
    sizes = {"fast_weight": (dpfp, 2 * 36 * 9), "softmax": (softmax, 7 * 2 * 18), "relative": (relative, 12 * 2 * 18)}
    assert all(MIXERS[name].size(layer, 7) == size for name, (layer, size) in sizes.items())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", SEQUENCE_LAYERS.values(), ids=SEQUENCE_LAYERS)
def test_biases_of_all_projections_or_of_none(make, bias):
    """Of what is projected from tokens, not from distances."""
    linears = {name: x for name, x in make(bias=bias).named_modules() if isinstance(x, torch.nn.Linear)}
    for name, linear in linears.items():
        assert (linear.bias is not None) == (bias and name != "distance"), name


def test_feedforward_is_its_equation():
    layer, x = FeedForward(D, 1, dropout=0.3, inner_dropout=0.1).eval(), torch.randn(2, 3, D)
    first, second = layer[0], layer[3]
    torch.testing.assert_close(layer(x), (x @ first.weight.T + first.bias).relu() @ second.weight.T + second.bias)
    shares = [[module.p for module in FeedForward(D, 12, *given) if hasattr(module, "p")] for given in ((), (0.3,))]
    assert [module.p for module in layer if hasattr(module, "p")] == [0.1, 0.3] and shares == [[0, 0], [0.3, 0.3]]
    with pytest.raises(ValueError, match="d_ff must be at least 1, got 0"):
        FeedForward(D, 0)


@pytest.mark.parametrize(
    "make", [fw.FastWeightAttention, fw.SoftmaxAttention, SoftmaxCrossAttention], ids=lambda m: m.__name__
)
def test_sizes_at_their_limits(make):
    assert (make(1, 1).d_head, make(D, 2).d_head, make(D, 3, 1).d_head) == (1, 4, 1)
    for sizes in ((0, 1), (1, 0), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            make(*sizes)
    with pytest.raises(ValueError, match="does not divide into 3 heads"):
        make(D, 3)


@pytest.mark.parametrize("make", SEQUENCE_LAYERS.values(), ids=SEQUENCE_LAYERS)
def test_states_of_a_stack_are_saved_and_each_is_one_of_its_own(make, tmp_path):
    layer, x = make().eval(), torch.randn(2, 5, D)
    _, state = layer(x[:, :4])
    stack = StackState([state, state.clone()], torch.tensor([4, 4]))
    stack.detach().save(tmp_path / "stack.safetensors")
    loaded = StackState.load(tmp_path / "stack.safetensors")
    assert torch.equal(loaded.position, stack.position) and len(loaded.layers) == 2
    for same in loaded.layers:
        assert torch.equal(layer.step(x[:, 4], same)[0], layer.step(x[:, 4], state)[0])
    # Tensors cannot be told equal by one truth value: a state is equal to itself alone.
    assert len({*stack.layers, *loaded.layers}) == 4 and state == state and state != loaded.layers[0]


@pytest.mark.parametrize("missing", ["kinds", "position", "known kinds"])
def test_a_file_that_is_no_stack_is_refused(tmp_path, missing):
    tensors, kinds = {"0.W": torch.zeros(1, 1, 2, 2), "position": torch.zeros(1)}, {"kinds": "FastWeightState"}
    if missing == "position":
        del tensors["position"]
    kinds = {"position": kinds, "kinds": {}, "known kinds": {"kinds": "FastWeightState OtherState"}}[missing]
    save_file(tensors, tmp_path / "file.safetensors", kinds)
    with pytest.raises(ValueError, match=r"not what StackState\.save writes"):
        StackState.load(tmp_path / "file.safetensors")
