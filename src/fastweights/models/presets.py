"""Language models by name and how each is trained.

`quick`, the default, learns in minutes on two CPU cores and reads text of any length in constant memory. `small` and
`medium` are the paper's, and `tiny` is their shape for a computer without a GPU. `small-fast` is the paper's small
model with a recipe of our own, for minutes on one GPU instead of days on two.

A preset is a function that returns a `LanguageModelConfig`; any field can be given to it by name, and so can `rule` and
`context`. `RECIPES` has the settings of its training. The perplexities are the paper's, validation / test, with a
sliding window of L words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastweights.common.tables import check_name, look_up
from fastweights.layers.fast_weight import RECIPES as LAYER_RECIPES
from fastweights.models.language_model import LanguageModelConfig
from fastweights.ops.rules import update_rule

_WIKITEXT103 = {"vocab_size": 267_735, "cutoffs": (20_000, 40_000, 200_000), "n_layers": 16, "n_heads": 8, "d_ff": 2048}
_WIKITEXT2 = {"vocab_size": 33_278, "cutoffs": (2_000, 10_000), "n_layers": 4, "n_heads": 4, "d_ff": 512}
_QUICK = {"vocab_size": 2_048, "cutoffs": (5_000, 20_000), "n_layers": 4, "n_heads": 4, "d_ff": 512}
SIZES: dict[str, Mapping[str, Any]] = {
    "quick": {**_QUICK, "d_model": 128},
    "small": {**_WIKITEXT103, "d_model": 128},
    "medium": {**_WIKITEXT103, "d_model": 256},
    "tiny": {**_WIKITEXT2, "d_model": 128},
}


@dataclass(frozen=True)
class Choice:
    """A row of the paper's tables, or a layer of models in use: the sequence layer, its update rule and feature map.

    `options` are those of the feature map, and `layer` are more fields of `LanguageModelConfig`.
    """

    mixer: str
    rule: str | None = None
    feature_map: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)


def _in_use(name: str) -> Choice:
    recipe = dict(LAYER_RECIPES[name])
    return Choice("fast_weight", recipe.pop("rule"), recipe.pop("feature_map"), layer=recipe)


MIXER_CHOICES: dict[str, Choice] = {
    "delta": Choice("fast_weight", "delta", "elu"),
    "linear": Choice("fast_weight", "sum", "elu"),
    "performer": Choice("fast_weight", "sum", "favor", {"orthogonal": True}),
    "dpfp": Choice("fast_weight", "sum", "dpfp", {"nu": 1}),
    **{name: _in_use(name) for name in LAYER_RECIPES},
    "transformer": Choice("softmax"),
    "xl": Choice("relative"),
}
CONTEXTS = ("limited", "carried")
RECIPES: dict[str, Mapping[str, Any]] = {
    "quick": {
        "segment": 64,
        "batch_size": 16,
        "steps": 2_400,
        "lr": 4e-3,
        "warmup": 50,
        "clip": 1.0,
        "betas": (0.9, 0.95),
        "schedule": "linear",
    },
    "small": {"segment": 256, "batch_size": 96, "steps": 500_000},
    "medium": {"segment": 384, "batch_size": 56, "steps": 400_000},
    "tiny": {"segment": 128, "batch_size": 16, "steps": 2_000, "lr": 1e-3, "warmup": 200},
    "small-fast": {
        "segment": 256,
        "batch_size": 96,
        "steps": 21_000,
        "lr": 2e-3,
        "warmup": 500,
        "clip": 1.0,
        "schedule": "linear",
        "optimizer": "muon",
        "muon_lr": 0.01,
    },
}
"""Arguments of `LanguageTask` and fields of `TrainingConfig`, whose defaults are those of Sec. 6.3 and App. F."""


def usual_normalization(rule: str) -> str:
    """Return how a rule is normalised in the paper.

    Rules that only add divide by attention's sum. Those that also remove need the sums of Eq. 29 and do best without
    more.
    """
    return "attention" if update_rule(rule).only_adds else "sum"


def training_recipe(preset: str, mixer: str = "delta", rule: str | None = None) -> dict[str, Any]:
    """Return how the model of that preset, mixer and rule is trained.

    Transformer-XL carries its memory and stops earlier. Memories that only add fill up when they are carried (Table 4).
    """
    recipe = dict(look_up(RECIPES, preset, "preset"))
    rule = look_up(MIXER_CHOICES, mixer, "mixer").rule if rule is None else rule
    if mixer == "xl" or (preset == "quick" and rule is not None and not update_rule(rule).only_adds):
        recipe["context"] = "carried"
        if preset == "medium":
            recipe |= {"steps": 200_000, "warmup": 1000}
    return recipe


def quick(
    mixer: str = "delta", rule: str | None = None, context: str = "carried", **overrides: Any
) -> LanguageModelConfig:
    """4 layers, d_model 128, 4 heads, L = 64: learns in minutes on two CPU cores and reads text of any length.

    Its state has one size however long the text: there are no positions, and with mixer "delta" a gate lets the
    memory fade (the gated delta rule, with SiLU and l2 normalisation) and each segment continues from the one before.
    Blocks are pre-norm. Up to 5,000 words, pieces, characters or bytes have a plain softmax, more an adaptive one.

    Command: `fastweights train lm --preset quick`, which is the default.
    Cost: 2.5 M words, or whatever the corpus is made of; about five minutes of one CPU core.
    Expected: the paper has no such model; 1.25 nats per byte of the validation text of Python's documentation.
    """
    usual: dict[str, Any] = {"norm": "pre", "dropout": 0.0, "init_std": 0.06}
    usual["positions"] = "sinusoid" if mixer == "transformer" else "none"
    # Rules that only add have the paper's map, whose features are positive: attention's sum of them is no difference.
    if mixer == "delta" and not (rule and update_rule(rule).only_adds):
        usual |= {"feature_map": "silu", "normalization": "l2", "output_scale": False}
        rule = rule or "gated_delta"
    return _config("quick", mixer, rule, context, **{**usual, **overrides})


def small(mixer: str = "delta", **fields: Any) -> LanguageModelConfig:
    """16 layers, d_model 128, 8 heads, L = 256: Tables 2 and 5 on WikiText-103, 44 M parameters.

    Command: `fastweights train lm --preset small --mixer delta`.
    Cost: 12.3 G words; 2.3 days on two V100 at the 63 K words/s of the paper's delta kernel.
    Expected: transformer 33.0 / 34.1; linear 37.1 / 38.3; delta 34.1 / 35.5; performer 39.0 / 39.6 and with
    rule="delta" 36.1 / 37.2. Table 5, not overcapacity: performer with feature_map_options={"m": 16} 38.0 / 38.8 and
    delta 36.0 / 37.0; dpfp 37.7 / 38.8 and delta 33.9 / 35.0.
    """
    return _config("small", mixer, **fields)


def medium(mixer: str = "delta", **fields: Any) -> LanguageModelConfig:
    """16 layers, d_model 256, 8 heads, L = 384: Tables 2 to 4 on WikiText-103, 90 M parameters.

    Command: `fastweights train lm --preset medium --mixer delta`.
    Cost: 8.6 G words; less than four days on two V100.
    Expected: transformer 27.9 / 29.6; linear 31.1 / 33.0; delta 29.7 / 31.5; performer 32.2 / 33.8 and with
    rule="delta" 30.0 / 31.8. Table 3: delta with positions="none" 28.1 / 31.1, with normalization="both" 30.4 / 32.1,
    with both 29.2 / 31.2. Table 4, context="carried": delta 27.8 / 29.4, linear over 260, and xl with a memory of
    15, 64, 128 and 384 words 65.7 / 65.5, 29.3 / 30.1, 26.4 / 27.4 and 24.6 / 25.5.
    """
    return _config("medium", mixer, **fields)


def tiny(mixer: str = "delta", **fields: Any) -> LanguageModelConfig:
    """4 layers, d_model 128, 4 heads, L = 128: learns from WikiText-2 on two CPU cores, 5 M parameters.

    Command: `fastweights train lm --preset tiny --mixer delta`.
    Cost: 4.1 M words, two epochs of WikiText-2.
    Expected: the paper has no such model; `results/table2` has what was measured on WikiText-2 after 3,600 steps.
    """
    return _config("tiny", mixer, **fields)


def small_fast(mixer: str = "delta", **fields: Any) -> LanguageModelConfig:
    """The model of `small`, without dropout, to be trained within minutes; not the paper's recipe, one for all mixers.

    Command: `fastweights train lm --preset small-fast --mixer delta --precision bf16 --compile default --graph`.
    Cost: 516 M words, five passes over a text of WikiText-103's size; minutes on an H200.
    Expected: the paper has no such training; `results/table2` has what was measured on Wikipedia, where it has been.
    """
    return small(mixer, **{"dropout": 0.0, **fields})


PRESETS: dict[str, Callable[..., LanguageModelConfig]] = {
    "quick": quick,
    "small": small,
    "medium": medium,
    "tiny": tiny,
    "small-fast": small_fast,
}


def _config(
    preset: str, mixer: str, rule: str | None = None, context: str = "limited", **overrides: Any
) -> LanguageModelConfig:
    """Make a configuration of the preset's sizes, what follows from mixer, rule and context, and the overrides."""
    choice = look_up(MIXER_CHOICES, mixer, "mixer")
    check_name(CONTEXTS, context, "context")
    LanguageModelConfig.check_names(overrides)
    values: dict[str, Any] = {**SIZES[preset], **overrides}
    if "cutoffs" not in overrides:
        # A smaller vocabulary has fewer clusters.
        values["cutoffs"] = tuple(cutoff for cutoff in values["cutoffs"] if cutoff < values["vocab_size"])
    # Backward positions have no meaning in a text that continues, and Transformer-XL has its own.
    values.setdefault("positions", "none" if context == "carried" or mixer == "xl" else "sinusoid")
    if choice.mixer == "relative":
        values.setdefault("mem_len", RECIPES[preset]["segment"])
    if choice.mixer != "fast_weight":
        if rule is not None:
            raise ValueError(f"rule = {rule!r} does nothing with mixer {mixer!r}: it has no fast weights; leave it out")
        return LanguageModelConfig(mixer=choice.mixer, **values)
    rule = choice.rule if rule is None else rule
    phi = values.setdefault("feature_map", choice.feature_map)
    options = {**choice.options} if phi == choice.feature_map else {}
    if phi == "favor":
        # As much capacity as ELU + 1 has: 2 m = d_head. That is the paper's m = 8 (small) and 16 (medium).
        options["m"] = max(1, (values.get("d_head") or values["d_model"] // values["n_heads"]) // 2)
    values["feature_map_options"] = {**options, **values.get("feature_map_options", {})}
    values = {**choice.layer, **values}
    values.setdefault("normalization", usual_normalization(str(rule)))
    values.setdefault("output_scale", True)
    return LanguageModelConfig(mixer=choice.mixer, rule=str(rule), **values)
