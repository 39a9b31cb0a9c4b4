"""Small random models with every kind of memory, recorded while they read a text."""

from types import SimpleNamespace

import torch

import fastweights as fw
from fastweights.data.tokenizer import ByteTokenizer
from fastweights.look.page import decoded
from fastweights.look.record import record

TEXT = "A text,\nof </script> & bytes {data}."
MODELS = {
    "sum": {"rule": "sum", "normalization": "attention"},
    "delta": {"rule": "delta", "normalization": "both", "feature_map": "dpfp", "feature_map_options": {"nu": 2}},
    "gated": {"rule": "gated", "feature_map": "relu"},
    "comba": {"rule": "comba", "normalization": "l2", "feature_map": "silu"},
    "kda": {"rule": "gated_delta", "normalization": "smooth_l2", "decay_per": "key", "short_conv": 3, "beta_max": 1.5},
    "decay": {"rule": "decay", "normalization": "attention", "positions": "sinusoid"},
}


def trained(**options):
    """A random language model of bytes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "d_model": 12, "n_layers": 3, "n_heads": 2, "d_ff": 8, "init_std": 0.5}
    model = fw.LanguageModel(fw.LanguageModelConfig(**{**sizes, **options})).eval()
    return SimpleNamespace(model=model, tokenizer=ByteTokenizer())


def recorded(name, layers=(1, 3)):
    """The recording of one of `MODELS`."""
    reader = trained(**MODELS[name])
    return record(reader, reader.tokenizer.encode(TEXT), name, layers)


def arrays(data, block):
    """The arrays of one layer of a page's data, in float64."""
    H, D, M, T = data["H"], data["D"], data["M"], len(data["tokens"])
    shapes = {"q": (H, T, D), "k": (H, T, D), "v": (H, T, M), "a": (H, T, D), "e": (H, T), "w": (H, T)}
    return {name: decoded(name, block[name], shape) for name, shape in shapes.items() if block[name] is not None}
