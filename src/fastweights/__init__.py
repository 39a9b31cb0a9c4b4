"""Fast weights, linear attention and the delta rule, after *Linear Transformers Are Secretly Fast Weight Programmers*.

Names are loaded when first used, so that the command line starts without waiting for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastweights import probe as probe
    from fastweights.feature_maps import FeatureMap as FeatureMap
    from fastweights.feature_maps import feature_map as feature_map
    from fastweights.feature_maps import list_feature_maps as list_feature_maps
    from fastweights.feature_maps import register_feature_map as register_feature_map
    from fastweights.inference.prefixes import PrefixStore as PrefixStore
    from fastweights.inference.stream import Stream as Stream
    from fastweights.layers.fast_weight import FastWeightAttention as FastWeightAttention
    from fastweights.layers.relative import RelativeAttention as RelativeAttention
    from fastweights.layers.softmax import SoftmaxAttention as SoftmaxAttention
    from fastweights.models.language_model import LanguageModel as LanguageModel
    from fastweights.models.language_model import LanguageModelConfig as LanguageModelConfig
    from fastweights.models.translation import TranslationModel as TranslationModel
    from fastweights.models.translation_config import TranslationModelConfig as TranslationModelConfig
    from fastweights.ops.backends import list_backends as list_backends
    from fastweights.ops.backends import register_backend as register_backend
    from fastweights.ops.linear_attention import linear_attention as linear_attention
    from fastweights.ops.memory import fast_weight_memory as fast_weight_memory
    from fastweights.ops.normalization import l2_normalize as l2_normalize
    from fastweights.ops.normalization import sum_normalize as sum_normalize
    from fastweights.ops.rules import Gate as Gate
    from fastweights.ops.rules import list_rules as list_rules
    from fastweights.ops.rules import register_rule as register_rule
    from fastweights.ops.rules import update_rule as update_rule
    from fastweights.ops.state import FastWeightState as FastWeightState
    from fastweights.training.runs.trained import load as load

_HOMES = {
    "FastWeightAttention": "layers.fast_weight",
    "FastWeightState": "ops.state",
    "FeatureMap": "feature_maps",
    "Gate": "ops.rules",
    "LanguageModel": "models.language_model",
    "LanguageModelConfig": "models.language_model",
    "PrefixStore": "inference.prefixes",
    "RelativeAttention": "layers.relative",
    "SoftmaxAttention": "layers.softmax",
    "Stream": "inference.stream",
    "TranslationModel": "models.translation",
    "TranslationModelConfig": "models.translation_config",
    "fast_weight_memory": "ops.memory",
    "feature_map": "feature_maps",
    "l2_normalize": "ops.normalization",
    "linear_attention": "ops.linear_attention",
    "list_backends": "ops.backends",
    "list_feature_maps": "feature_maps",
    "list_rules": "ops.rules",
    "load": "training.runs.trained",
    "register_backend": "ops.backends",
    "register_feature_map": "feature_maps",
    "register_rule": "ops.rules",
    "sum_normalize": "ops.normalization",
    "update_rule": "ops.rules",
}
_MODULES = ("probe",)
__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"fastweights.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fastweights' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"fastweights.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
