"""The translation model: whole = token by token, padding without a trace, sizes of App. E, and what is refused."""

import pytest
import torch

from fastweights.models.translation import TranslationModel
from fastweights.models.translation_config import ATTENTIONS, TranslationModelConfig
from fastweights.models.translation_presets import PRESETS, RECIPES
from fastweights.training.tasks.translation import plan_translation

V = 13
SIZES = {"vocab_size": V, "d_model": 8, "n_heads": 2, "d_ff": 10, "encoder_layers": 2, "decoder_layers": 2}
MODELS = {
    **{name: {"encoder": name, "decoder": name, "cross": name} for name in ATTENTIONS},
    "delta": {"encoder": "linear", "decoder": "dpfp", "cross": "softmax", "rule": "delta", "normalization": "sum"},
    "pre": {"encoder": "dpfp", "decoder": "softmax", "cross": "linear", "norm": "pre"},
}


def make(kind="linear", **options):
    torch.manual_seed(1)
    return TranslationModel(TranslationModelConfig(**{**SIZES, **MODELS[kind], **options})).double().eval()


def sentences(B=3, S=7, T=5):
    source, target = torch.randint(4, V, (B, S)), torch.randint(4, V, (B, T))
    return source, torch.arange(S) < torch.tensor([S, 2, 4][:B]).unsqueeze(1), target


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_of_mixed_lengths_is_one_by_one(kind):
    model, (source, mask, target) = make(kind), sentences()
    ends, lengths = (5, 3, 1), mask.sum(1).tolist()
    counts = torch.arange(5) < torch.tensor(ends).unsqueeze(1)
    following = torch.randint(4, V, target.shape)
    losses, _ = model.loss(source, mask, target, following, 0.1)
    (losses * counts).sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i, (n, t) in enumerate(zip(lengths, ends, strict=True)):
        row = slice(i, i + 1)
        alone, _ = model.loss(source[row, :n], None, target[row, :t], following[row, :t], 0.1)
        torch.testing.assert_close(alone[0], losses[i, :t])
        alone.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_whole_is_in_parts_is_token_by_token(kind):
    model, (source, mask, target) = make(kind), sentences()
    whole = model(source, mask, target)
    state = model.encode(source, mask)
    first, state = model.decode(target[:, :2], state)
    second, state = model.decode(target[:, 2:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    state, steps = model.encode(source, mask), []
    for token in target.unbind(1):
        log_p, state = model.step(token, state)
        steps.append(log_p)
    torch.testing.assert_close(torch.stack(steps, 1), whole.log_softmax(-1))


@pytest.mark.parametrize("kind", MODELS)
def test_the_decoder_sees_no_future_and_the_encoder_everything(kind):
    model, (source, mask, target) = make(kind), sentences()
    before = model(source, mask, target)
    target[:, 3] = (target[:, 3] - 3) % (V - 4) + 4
    after = model(source, mask, target)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert (after[:, 3] != before[:, 3]).any(-1).all()
    source[1, 1] = (source[1, 1] - 3) % (V - 4) + 4
    changed = model(source, mask, target)
    torch.testing.assert_close(changed[[0, 2]], after[[0, 2]])
    assert (changed[1, 0] != after[1, 0]).any()


@pytest.mark.parametrize("kind", MODELS)
def test_beams_share_what_was_read_and_can_fork(kind):
    model, (source, mask, target) = make(kind), sentences()
    state = model.encode(source, mask)
    _, state = model.step(target[:, 0].repeat_interleave(2), state)
    # Both beams of the last sentence become its second one, and the first sentence is done.
    state = state.reorder(torch.tensor([2, 3, 5, 5]), torch.tensor([1, 2]))
    log_p, state = model.step(target[1:, 1].repeat_interleave(2), state)
    expected = model(source[1:], mask[1:], target[1:, :2]).log_softmax(-1)[:, 1]
    torch.testing.assert_close(log_p, expected.repeat_interleave(2, 0))
    early = model.encode(source, mask).reorder(torch.tensor([2]), torch.tensor([2]))
    torch.testing.assert_close(model.step(target[2:, 0], early)[0], model(source, mask, target).log_softmax(-1)[2:, 0])


def test_a_state_of_fast_weights_does_not_grow():
    sizes = {}
    for kind in ("linear", "softmax"):
        model = make(kind)
        found = []
        for length in (3, 30):
            source = torch.randint(4, V, (1, length))
            _, state = model.decode(source, model.encode(source))
            found.append(state.nbytes)
        sizes[kind] = found
    assert sizes["linear"][0] == sizes["linear"][1] and sizes["softmax"][1] > 9 * sizes["softmax"][0]


def test_label_smoothing_spreads_probability_over_all_tokens():
    model, (source, mask, target) = make(), sentences()
    following = torch.randint(4, V, target.shape)
    smoothed, nll = model.loss(source, mask, target, following, 0.1)
    logits = model(source, mask, target).flatten(0, 1)
    entropy = torch.nn.functional.cross_entropy
    expected = entropy(logits, following.flatten(), reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(smoothed.flatten(), expected)
    torch.testing.assert_close(nll.flatten(), entropy(logits, following.flatten(), reduction="none"))
    assert model.loss(source, mask, target, following)[0].equal(nll)


def test_d_dot_is_that_of_appendix_e():
    """Table 6, and the columns of Table 1, with d_key = 64."""
    config = {"vocab_size": V, "encoder": "performer", "decoder": "dpfp", "cross": "linear"}
    for d_dot, m, nu in ((256, 128, 2), (384, 192, 3), (512, 256, 4)):
        model = TranslationModelConfig(**config, features=m, nu=nu)
        assert (model.d_head, model.d_dot("performer"), model.d_dot("dpfp")) == (64, d_dot, d_dot)
        assert model.d_dot("linear") == model.d_dot("softmax") == 64
    assert TranslationModelConfig(vocab_size=V, encoder="performer", features=32).d_dot("performer") == 64
    with torch.device("meta"):
        built = TranslationModel(TranslationModelConfig(**{**config, "encoder_layers": 1, "decoder_layers": 1}))
    assert built.encoder[0].attention.feature_map.dim == 512  # the default, 4 d_head features
    assert built.decoder[0].attention.feature_map.dim == 256 and built.decoder[0].cross.feature_map.dim == 64


def test_performer_estimates_the_kernel_of_softmax_with_orthogonal_features():
    model = make("performer", redraw=False)
    for layer in (model.encoder[0].attention, model.decoder[0].attention, model.decoder[0].cross):
        phi = layer.feature_map
        assert (phi.orthogonal, phi.scale, phi.redraws, phi.m) == (True, True, False, 4 * 4)
    assert model.config.map_options("softmax") == model.config.map_options("linear") == {}


def test_presets_have_the_sizes_of_the_paper():
    with torch.device("meta"):
        models = {name: TranslationModel(preset()) for name, preset in PRESETS.items()}
    big, base = models["big"].config, models["base"].config
    assert (big.d_model, big.n_heads, big.d_ff, big.d_head, big.dropout) == (1024, 16, 4096, 64, 0.3)
    assert (base.d_model, base.n_heads, base.d_ff, base.d_head, base.dropout) == (512, 8, 2048, 64, 0.1)
    assert all(len(models[name].encoder) == len(models[name].decoder) == 6 for name in ("big", "base"))
    # 6 x (4 + 8) d² + 6 x (8 + 8) d² weights, and the embeddings once; the rest are biases and LayerNorms.
    assert models["big"].n_parameters - 168 * 1024**2 - 32_000 * 1024 < 200_000
    recipe = RECIPES["big"]
    assert (recipe["max_tokens"], recipe["accumulate"], recipe["label_smoothing"]) == (3 * 3584, 16, 0.1)
    assert plan_translation(9, preset="base", steps=10, warmup=1).training.steps == 10
    tiny = models["tiny"].config
    assert (tiny.d_model, tiny.n_heads, tiny.d_ff, tiny.dropout) == (64, 4, 256, 0.0)
    assert (tiny.encoder_layers, tiny.decoder_layers) == (2, 2)
    assert big.vocab_size == base.vocab_size == tiny.vocab_size == 32_000


def test_recipes():
    big, base, tiny = (RECIPES[name] for name in ("big", "base", "tiny"))
    # Vaswani et al.: Adam, warm-up, and at its end the rate (d_model warm-up)^-1/2.
    for recipe in (big, base):
        assert (recipe["warmup"], recipe["schedule"], recipe["clip"]) == (4000, "inverse_sqrt", None)
        assert (recipe["betas"], recipe["eps"], recipe["max_length"]) == ((0.9, 0.98), 1e-9, 256)
    assert (base["max_tokens"], base["steps"], base["lr"]) == (25_000, 100_000, round((512 * 4000) ** -0.5, 4))
    assert (big["steps"], big["lr"]) == (35_000, 5e-4)
    assert (tiny["max_tokens"], tiny["steps"], tiny["warmup"], tiny["lr"], tiny["clip"]) == (1000, 1000, 100, 4e-3, 1.0)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_preset_has_its_attention_everywhere_unless_told(attention):
    config = PRESETS["tiny"](attention)
    assert config.attentions == (attention,) * 3
    assert PRESETS["tiny"](attention, cross="softmax").attentions == (attention, attention, "softmax")
    assert config.rule == "sum" and config.normalization == "attention"
    # The paper's draws new features for each batch; tiny's training is too short for that.
    assert PRESETS["big"](attention).redraw and config.redraw == (attention != "performer")
    assert PRESETS["tiny"](attention, cross="performer", redraw=True).redraw
    if attention != "softmax":
        assert PRESETS["tiny"](attention, rule="delta").normalization == "sum"


def test_configuration_goes_through_json():
    config = PRESETS["big"]("dpfp", nu=4, rule="delta")
    assert TranslationModelConfig.from_dict(config.to_dict()) == config


def test_performer_draws_new_features_for_each_batch_of_training():
    model, (source, mask, target) = make("performer").train(), sentences()
    first, second = (model.loss(source, mask, target, target)[1] for _ in range(2))
    assert not torch.equal(first, second)
    still = make("performer", redraw=False, dropout=0.0).train()
    assert torch.equal(*(still.loss(source, mask, target, target)[1] for _ in range(2)))
    _, state = model.decode(target[:, :2], model.encode(source, mask))
    with pytest.raises(ValueError, match="redraw = False"):
        model.decode(target[:, 2:], state)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_autocast_agrees_with_full_precision(kind):
    model, (source, mask, target) = make(kind).float(), sentences()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(source, mask, target)
        state = model.encode(source, mask)
        log_p, state = model.step(target[:, 0], state)
        second, _ = model.step(target[:, 1], state)
    expected = model(source, mask, target)
    torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.1)
    assert log_p.dtype == torch.float32
    torch.testing.assert_close(second, expected.log_softmax(-1)[:, 1], atol=0.1, rtol=0.1)


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    model = make("delta", encoder_layers=1, decoder_layers=1)
    compiled = torch.compile(lambda *batch: model.loss(*batch, 0.1)[0], fullgraph=True, backend="aot_eager")
    # By the second shape sizes are symbols.
    for B, S, T in ((3, 7, 5), (2, 6, 4), (3, 5, 7)):
        source, mask, target = sentences(B, S, T)
        losses = compiled(source, mask, target, target)
        torch.testing.assert_close(losses, model.loss(source, mask, target, target, 0.1)[0])
    losses.sum().backward()
    assert model.embedding.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "linaer"}, "did you mean 'linear'"),
        ({"nu": 3}, "nu = 3 is for dpfp attention"),
        ({"features": 3}, "features = 3 is for performer attention"),
        ({"rule": "delta"}, "fast weights in the decoder"),
        ({"decoder": "dpfp", "nu": 99}, "nu must be a whole number from 1"),
        ({"encoder": "linear", "decoder": "linear", "cross": "linear", "attention_dropout": 0.1}, "softmax attention"),
        ({"n_heads": 3}, "does not divide into 3 heads"),
        ({"d_model": 9, "n_heads": 1}, "must be even"),
        ({"dropout": 1.5}, "dropout: dropout must be at least 0"),
        ({"d_ff": 0}, "d_ff must be a whole number"),
        ({"norm": "past"}, "did you mean 'post'"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TranslationModelConfig(**{**SIZES, **options})


def test_bad_tokens_are_refused():
    model, (source, mask, target) = make(), sentences()
    with pytest.raises(ValueError, match="source must be tokens from 0 to vocab_size - 1 = 12, got 4 to 99"):
        model(source.where(source != source[0, 0], 99).clamp(min=4), mask, target)
    with pytest.raises(TypeError, match="target must be int64"):
        model(source, mask, target.float())
    with pytest.raises(ValueError, match="rows of tokens go through decode"):
        model.step(target, model.encode(source, mask))
    with pytest.raises(ValueError, match="source must be rows"):
        model.encode(source[0])
    with pytest.raises(ValueError, match="unknown field"):
        TranslationModelConfig.from_dict({"vocab_size": 3, "d_modle": 3})
    with pytest.raises(ValueError, match="vocab_size is missing"):
        TranslationModelConfig.from_dict({})
