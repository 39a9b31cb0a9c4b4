"""Configurations and what they refuse; presets: counts and sizes to the last digit that the paper prints, recipes."""

import inspect
import json
from dataclasses import replace

import pytest
import torch

from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.models.presets import (
    MIXER_CHOICES,
    PRESETS,
    RECIPES,
    medium,
    small,
    tiny,
    training_recipe,
)
from fastweights.ops.rules import RULES
from fastweights.training.engine.config import TrainingConfig
from fastweights.training.tasks.language import plan


def build(config: LanguageModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(config)


def millions(number: int, digits: int) -> str:
    return f"{number / 1e6:.{digits}f}"


@pytest.mark.parametrize(
    ("config", "printed"),
    [
        (medium("linear"), "89.8"),
        (medium("delta"), "89.9"),
        (medium("xl"), "90.9"),
        (medium("transformer"), "89.8"),
        (small("linear"), "44.02"),
        (small("delta"), "44.03"),
    ],
)
def test_parameter_counts(config, printed):
    assert millions(build(config).n_parameters, len(printed.split(".")[1])) == printed


@pytest.mark.parametrize(("preset", "gates"), [(small, 16_384), (medium, 32_768)])
@pytest.mark.parametrize("mixer", ["linear", "performer", "dpfp"])
def test_the_delta_rule_costs_its_gates(mixer, preset, gates):
    added = build(preset(mixer, rule="delta")).n_parameters - build(preset(mixer, rule="sum")).n_parameters
    assert added == gates


def test_models_without_gates_and_distances_are_of_one_size():
    sizes = {build(small(name)).n_parameters for name in ("linear", "performer", "dpfp", "transformer")}
    assert len(sizes) == 1


@pytest.mark.parametrize("mixer", ["delta", "linear"])
def test_state_size_of_fast_weights(mixer):
    assert millions(build(medium(mixer)).state_size(384), 2) == "0.13"


@pytest.mark.parametrize(
    ("memory", "segment", "printed"), [(15, 1, "0.13"), (64, 64, "1.05"), (128, 128, "2.10"), (384, 384, "6.29")]
)
def test_state_size_of_transformer_xl(memory, segment, printed):
    model = build(medium("xl"))
    model.set_memory(memory, clamp_len=384)
    assert millions(model.state_size(segment), 2) == printed


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mixer", MIXER_CHOICES)
def test_every_preset_has_every_mixer(preset, mixer):
    config = PRESETS[preset](mixer, vocab_size=50, n_layers=1, dropout=0.0)
    assert config.cutoffs == () and (config.vocab_size, config.n_layers) == (50, 1)
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    nll, _ = LanguageModel(config).loss(torch.randint(50, (2, 7)), torch.randint(50, (2, 7)))
    assert nll.isfinite().all()
    documentation = inspect.getdoc(PRESETS[preset])
    assert all(word in documentation for word in (f"--preset {preset}", "Cost:", "Expected:"))


def test_choices():
    delta, linear = small("delta"), small("linear")
    assert (delta.rule, delta.normalization, delta.feature_map) == ("delta", "sum", "elu")
    assert (linear.rule, linear.normalization, linear.feature_map) == ("sum", "attention", "elu")
    assert small("linear", rule="delta") == delta and small("delta", rule="sum") == linear
    assert small("performer").feature_map_options == {"orthogonal": True, "m": 8}
    assert medium("performer", rule="delta").feature_map_options["m"] == 16
    assert small("performer", feature_map_options={"m": 16}).feature_map_options == {"orthogonal": True, "m": 16}
    assert small("dpfp").feature_map_options == {"nu": 1} and small("dpfp", rule="delta").normalization == "sum"
    assert small("dpfp", feature_map="relu").feature_map_options == {}
    assert (medium("xl").mem_len, medium("xl").positions, medium("transformer").positions) == (384, "none", "sinusoid")
    assert medium(context="carried").positions == "none" and medium().positions == "sinusoid"
    assert medium().output_scale and medium(normalization="both").normalization == "both"
    assert small(vocab_size=33_278).cutoffs == (20_000,) and tiny().cutoffs == (2_000, 10_000)


def test_layers_of_models_in_use():
    kda, gated = tiny("kda"), small("gated-deltanet")
    assert (kda.rule, kda.decay_per, kda.feature_map, kda.normalization) == ("gated_delta", "key", "silu", "smooth_l2")
    assert (gated.decay_per, gated.output_norm, gated.short_conv) == ("head", "rms_gated", 4)
    assert small("gated-deltanet", short_conv=0).short_conv == 0 and small("deltanet", beta_max=2.0).beta_max == 2


@pytest.mark.parametrize("mixer", ["deltanet", "gated-deltanet", "kda"])
def test_models_in_use_stream_what_they_give_for_whole_texts(mixer):
    torch.manual_seed(0)
    model = LanguageModel(tiny(mixer, vocab_size=50, n_layers=2, context="carried")).double().eval()
    tokens = torch.randint(50, (2, 12))
    whole, end = model(tokens)
    rows, state = [], None
    for t in range(12):
        log_p, state = model.step(tokens[:, t], state)
        rows.append(log_p)
    torch.testing.assert_close(torch.stack(rows, 1), model.softmax.log_prob(whole))
    assert state.numel == end.numel == model.state_size(1)


def test_stored_configurations_stay_equal():
    """Fields that came later are stored only where they are not at their default."""
    assert not {*LanguageModelConfig.ADDED} & {*small().to_dict()}
    assert small("kda").to_dict()["decay_per"] == "key"


def test_recipes():
    small = plan(99, preset="small")
    assert (small.task["segment"], small.task["batch_size"]) == (256, 96)
    assert small.training == TrainingConfig(steps=500_000, lr=2.5e-4, warmup=2000, clip=0.25)
    medium = plan(99, preset="medium")
    assert (medium.task["segment"], medium.task["batch_size"]) == (384, 56)
    assert (medium.training.steps, medium.training.clip) == (400_000, 0.25)
    xl = plan(99, preset="medium", mixer="xl")
    assert (xl.task["context"], xl.task["segment"]) == ("carried", 384)
    assert (xl.training.steps, xl.training.warmup) == (200_000, 1000)
    assert plan(99, preset="medium", context="carried", batch_size=7).task["batch_size"] == 7
    assert PRESETS.keys() == RECIPES.keys()


@pytest.mark.parametrize(
    ("preset", "words"),
    [("small", "12.3 G words"), ("medium", "8.6 G"), ("tiny", "4.1 M"), ("small-fast", "516 M"), ("quick", "2.5 M")],
)
def test_the_cost_of_a_recipe_is_that_of_its_documentation(preset, words):
    recipe = RECIPES[preset]
    number, unit = words.split()[:2]
    total = recipe["steps"] * recipe["batch_size"] * recipe["segment"] / {"G": 1e9, "M": 1e6}[unit]
    assert f"{total:.{len(number.partition('.')[2])}f}" == number
    assert f"Cost: {words}" in inspect.getdoc(PRESETS[preset])


def test_sizes_are_those_of_their_documentation():
    for preset in PRESETS:
        config = PRESETS[preset]()
        documentation = inspect.getdoc(PRESETS["small" if preset == "small-fast" else preset])
        sizes = f"{config.n_layers} layers, d_model {config.d_model}, {config.n_heads} heads"
        assert documentation.startswith(f"{sizes}, L = {RECIPES[preset]['segment']}: ")
    # WikiText-103, WikiText-2, and a vocabulary that data without one of its own is given.
    words = {"small": (267_735, 2048), "medium": (267_735, 2048), "tiny": (33_278, 512), "quick": (2_048, 512)}
    assert {name: (PRESETS[name]().vocab_size, PRESETS[name]().d_ff) for name in words} == words
    assert small().cutoffs == medium().cutoffs == (20_000, 40_000, 200_000)
    assert tiny().cutoffs == (2_000, 10_000)


def test_recipes_of_our_own():
    tiny, fast = training_recipe("tiny"), training_recipe("small-fast")
    assert (tiny["lr"], tiny["warmup"]) == (1e-3, tiny["steps"] // 10)
    settings = {"lr": 2e-3, "warmup": 500, "clip": 1.0, "schedule": "linear", "optimizer": "muon", "muon_lr": 0.01}
    assert {name: fast[name] for name in settings} == settings


@pytest.mark.parametrize("rule", RULES)
def test_quick_with_any_rule(rule):
    """A rule that only adds is that of mixer linear, and no memory that fills up is carried."""
    adds = RULES[rule].only_adds
    assert training_recipe("quick", rule=rule).get("context", "limited") == ("limited" if adds else "carried")
    config = PRESETS["quick"](rule=rule)
    assert (config.rule, config.feature_map) == (rule, "elu" if adds else "silu")
    assert not adds or replace(config, rule="sum") == PRESETS["quick"]("linear")


def test_small_fast_is_the_model_of_small_with_another_recipe():
    for mixer in MIXER_CHOICES:
        assert replace(PRESETS["small-fast"](mixer), dropout=0.1) == small(mixer)
    assert PRESETS["small-fast"](dropout=0.3).dropout == 0.3
    fast, paper = RECIPES["small-fast"], RECIPES["small"]
    assert (fast["segment"], fast["batch_size"]) == (paper["segment"], paper["batch_size"])
    assert len({str(training_recipe("small-fast", mixer) | {"context": "limited"}) for mixer in MIXER_CHOICES}) == 1
    schedule = {"segment", "batch_size", "steps", "lr", "warmup"}
    assert all(recipe.keys() <= schedule for name, recipe in RECIPES.items() if name not in ("quick", "small-fast"))


def test_quick_streams_without_positions():
    config, task, training = plan(2_048, preset="quick")
    assert (config.rule, config.feature_map, config.normalization) == ("gated_delta", "silu", "l2")
    assert (config.positions, config.norm, task["context"]) == ("none", "pre", "carried")
    assert (training.lr, training.warmup, training.schedule) == (4e-3, 50, "linear")
    assert plan(2_048, preset="quick", rule="delta").model.rule == "delta"
    for mixer in MIXER_CHOICES:
        other = plan(2_048, preset="quick", mixer=mixer)
        limited = mixer in ("linear", "performer", "dpfp", "transformer")
        assert other.task["context"] == ("limited" if limited else "carried")
        assert other.model.norm == "pre" and other.model.positions == ("sinusoid" if mixer == "transformer" else "none")


@pytest.mark.parametrize(("size", "cutoffs"), [(256, ()), (2_048, ()), (8_192, (5_000,)), (33_278, (5_000, 20_000))])
def test_quick_takes_the_softmax_that_fits_its_tokens(size, cutoffs):
    assert plan(size, preset="quick").model.cutoffs == cutoffs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
        ({"n_layers": 1.5}, "n_layers must be a whole number of at least 1, got 1.5"),
        ({"n_heads": 5}, "d_model = 12 does not divide into 5 heads"),
        ({"cutoffs": (30,)}, "cutoffs must rise and lie between 0 and vocab_size = 23"),
        ({"dropout": 1.0}, "dropout: .* at least 0 and below 1, got 1.0"),
        ({"attention_dropout": -1}, "attention_dropout: .* got -1"),
        ({"mixer": "softmaxx"}, "unknown mixer 'softmaxx'; did you mean 'softmax'"),
        ({"rule": "dleta"}, "unknown rule 'dleta'; did you mean 'delta'"),
        ({"feature_map": "dfpf"}, "unknown feature_map 'dfpf'"),
        ({"normalization": "max"}, "unknown normalization 'max'"),
        ({"positions": "learnt"}, "unknown positions 'learnt'"),
        ({"position_direction": "up"}, "unknown position_direction 'up'"),
        ({"norm": "mid"}, "unknown norm 'mid'"),
        ({"init_std": -1}, "init_std must be at least 0"),
        ({"positions": "sinusoid", "d_model": 9, "n_heads": 3}, "d_model must be even"),
        ({"mixer": "softmax", "rule": "sum"}, "rule = 'sum' does nothing with mixer 'softmax'"),
        ({"mixer": "softmax", "feature_map_options": {"m": 3}}, "feature_map_options = .* does nothing"),
        ({"mem_len": 3}, "mem_len = 3 does nothing with mixer 'fast_weight'; .* use mixer 'relative'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 does nothing .* use mixer 'softmax' or 'relative'"),
    ],
    ids=str,
)
def test_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig(**{"vocab_size": 23, "d_model": 12, "n_heads": 2, **options})


def test_config_from_a_dictionary():
    with pytest.raises(ValueError, match="unknown field of LanguageModelConfig 'd_modle'; did you mean 'd_model'"):
        LanguageModelConfig.from_dict({"vocab_size": 3, "d_modle": 4})
    with pytest.raises(ValueError, match="vocab_size is missing; got d_model"):
        LanguageModelConfig.from_dict({"d_model": 4})


def test_errors():
    with pytest.raises(ValueError, match="unknown mixer 'dleta'; did you mean 'delta'"):
        small("dleta")
    with pytest.raises(ValueError, match="rule = 'delta' does nothing with mixer 'transformer'"):
        small("transformer", rule="delta")
    with pytest.raises(ValueError, match="unknown rule 'hebb'"):
        small(rule="hebb")
    with pytest.raises(ValueError, match="unknown field of LanguageModelConfig 'layers'"):
        small(layers=3)
    with pytest.raises(ValueError, match="unknown context 'endless'"):
        small(context="endless")
    with pytest.raises(ValueError, match="unknown preset 'larger'"):
        training_recipe("larger")
    with pytest.raises(ValueError, match="unknown mixer 'rnn'"):
        training_recipe("small", "rnn")
    with pytest.raises(ValueError, match="unknown field 'batch_sizes'; did you mean 'batch_size'"):
        plan(99, preset="small", batch_sizes=3)
    with pytest.raises(ValueError, match="steps must be above 0, got 0"):
        plan(99, preset="small", steps=0)
    with pytest.raises(ValueError, match="warmup must be from 0 to steps = 10, got 2000"):
        plan(99, preset="small", steps=10, warmup=2000)
