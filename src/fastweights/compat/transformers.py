"""Gated-delta models of Hugging Face's transformers, with the operators of this package bound into them.

Each of its modelling files looks up four functions as globals when a layer is called: the rule over a sequence and for
one token, and a short convolution over a sequence and for one token. `patch()` rebinds all four of a file, or none.
On processors where oneDNN multiplies float32 faster than what PyTorch takes, linear layers are bound as well.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.compat import linear_layers
from fastweights.compat.calls import Result, run
from fastweights.ops.cpu import products
from fastweights.ops.fused.short_convolution import short_convolution

MODELS = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "olmo_hybrid",
    "kimi_linear",
    "glm5_next",
    "bailing_hybrid",
)


def rule(
    family: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **context: object,
) -> Result:
    """Run the rule over sequences, and within each of several that are packed.

    Layers hand on the bounds of packed sequences as `cu_seqlens` or, with everything else that their model was called
    with, as `cu_seq_lens_q`. What else there is in `context` is for attention, or says how to compute.
    """
    bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    starts = _starts(query.flatten(2), seq_idx, None) if bounds is None else None
    return run(
        family,
        q=query,
        k=key,
        v=value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=bounds,
        starts=starts,
    )


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Result:
    """Apply the gated delta rule, with a decay for each head: Gated DeltaNet."""
    return rule("gated_delta_rule", query, key, value, **arguments)


def kimi_delta_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Result:
    """Apply the gated delta rule, with a decay for each key channel: Kimi Delta Attention."""
    return rule("kda", query, key, value, **arguments)


def _activate(x: Tensor, activation: str | None) -> Tensor:
    """Apply the activation of this name in transformers."""
    if activation in (None, "silu", "swish"):
        return x if activation is None else F.silu(x)
    return import_module("transformers.activations").ACT2FN[activation](x)


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **context: object,
) -> Tensor:
    """Convolve each channel of hidden_states (B, C, T) over time, within each of several sequences that are packed."""
    x, silu = hidden_states.transpose(1, 2), activation in ("silu", "swish")
    starts = _starts(x, seq_idx, cu_seq_lens_q)
    y, _ = short_convolution(x, weight.flip(1), bias, silu=silu, starts=starts)
    return (y if silu else _activate(y, activation)).transpose(1, 2)


def _starts(x: Tensor, seq_idx: Tensor | None, bounds: Tensor | None) -> Tensor | None:
    """Return where a new sequence begins in x (B, T, C), or None if there is but one.

    What comes before the packed tokens belongs to the first sequence: a cache prepends what it has kept.
    """
    B, T, _ = x.shape
    if bounds is not None:
        time = torch.arange(T, device=x.device) - (T - bounds[-1])
        return torch.isin(time, bounds[1:-1]).expand(B, T)
    if seq_idx is not None:
        return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (T - seq_idx.shape[1] + 1, 0))
    return None


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve the tokens (B, C, T) that follow conv_state (B, C, taps or more), and move that on in place."""
    T, taps = hidden_states.shape[2], weight.shape[1]
    x = torch.cat([conv_state, hidden_states], -1)
    conv_state.copy_(x[:, :, -conv_state.shape[2] :])
    if T == 1:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        y = (x[:, :, -taps:] * weight).sum(-1, keepdim=True)
        y = y if bias is None else y + bias.unsqueeze(-1)
        return _activate(y, activation).to(hidden_states.dtype)
    return causal_conv1d_fn(x, weight, bias, activation)[:, :, -T:].to(hidden_states.dtype)


# Names that a file may give to each of the four functions, those of the newest transformers first.
SLOTS: dict[str, dict[str, Callable[..., Any]]] = {
    "rule over a sequence": {
        "torch_chunk_gated_delta_rule": gated_delta_rule,
        "chunk_gated_delta_rule": gated_delta_rule,
        "chunk_kimi_delta_attention": kimi_delta_attention,
        "torch_chunk_kda": kimi_delta_attention,
    },
    "rule for one token": {
        "torch_recurrent_gated_delta_rule": gated_delta_rule,
        "recurrent_gated_delta_rule": gated_delta_rule,
        "fused_recurrent_gated_delta_rule": gated_delta_rule,
        "recurrent_kimi_delta_attention": kimi_delta_attention,
        "torch_recurrent_kda": kimi_delta_attention,
    },
    "convolution over a sequence": {"causal_conv1d_fn": causal_conv1d_fn, "torch_causal_conv1d_fn": causal_conv1d_fn},
    "convolution for one token": {
        "causal_conv1d_update": causal_conv1d_update,
        "torch_causal_conv1d_update": causal_conv1d_update,
    },
}


LINEAR_LAYERS = "linear layers"


class Binding(NamedTuple):
    """A global of a modelling file, or an attribute of a class in it, that is ours now."""

    model: str
    what: str
    owner: ModuleType | type
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]

    @property
    def label(self) -> str:
        """The name, with its class."""
        return self.name if isinstance(self.owner, ModuleType) else f"{self.owner.__name__}.{self.name}"


class Patch:
    """What `patch()` has bound. Print it for a table; `undo()`, or the end of a `with`, puts everything back."""

    def __init__(self, version: str, bindings: list[Binding]) -> None:
        self.version, self.bindings = version, bindings

    @property
    def models(self) -> list[str]:
        """The models that run on this package now."""
        return list(dict.fromkeys(binding.model for binding in self.bindings))

    def undo(self) -> None:
        """Put back what was bound before. What somebody else has bound since then stays."""
        while self.bindings:
            binding = self.bindings.pop()
            if getattr(binding.owner, binding.name) is binding.ours:
                setattr(binding.owner, binding.name, binding.original)
            if isinstance(binding.owner, type):
                linear_layers.release(binding.owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        if not self.bindings:
            return f"transformers {self.version}: nothing is bound"
        rows = [("model", "what", "name in its modelling file")]
        rows += [(binding.model, binding.what, binding.label) for binding in self.bindings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"transformers {self.version}, computed by fastweights:", *lines])

    __repr__ = __str__


def patch(*models: str) -> Patch:
    """Let the linear-attention layers of transformers' models compute with this package.

    Models that exist and that are made later change at once, on every device, and packed sequences (`cu_seq_lens_q`, or
    `seq_idx`) stay apart in them. What is bound already stays as it is.

    Args:
        *models: names of folders in `transformers.models`, such as "qwen3_next"; by default all of `MODELS` that the
            installed transformers has.

    Returns:
        What was bound, to be printed, and undone by `.undo()` or as a context manager.
    """
    try:
        version = import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(
            f"patch() needs transformers 5.16 or newer: pip install 'fastweights[hf]' ({error})"
        ) from error
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise ValueError(f"patch() knows {', '.join(MODELS)}, got {', '.join(map(repr, unknown))}")
    found = {name: f"transformers.models.{name}.modeling_{name}" for name in models or MODELS}
    absent = [name for name in found if find_spec(f"transformers.models.{name}") is None]
    if models and absent:
        raise ValueError(f"transformers {version} has no {', '.join(absent)}; call patch() for all models that it has")
    # Everything is looked up before anything is bound.
    bindings = [
        binding
        for name, path in found.items()
        if name not in absent
        for binding in _bindings(version, name, import_module(path))
    ]
    if not bindings and len(absent) == len(found):
        raise RuntimeError(f"transformers {version} has none of {', '.join(MODELS)}; patch() needs 5.16 or newer")
    for binding in bindings:
        setattr(binding.owner, binding.name, binding.ours)
    return Patch(version, bindings)


def _bindings(version: str, model: str, module: ModuleType) -> list[Binding]:
    """Return all four functions of a file, or fail: the rule without the convolution would mix packed sequences."""
    bindings = []
    for what, names in SLOTS.items():
        name = next((name for name in names if hasattr(module, name)), None)
        if name is None:
            raise RuntimeError(
                f"{module.__name__} of transformers {version} has no {what} under a name that is known here "
                f"({', '.join(names)}), so nothing was bound; known are transformers 5.16 to 5.23"
            )
        original = getattr(module, name)
        if original is not names[name]:
            bindings.append(Binding(model, what, module, name, original, names[name]))
    if products.unavailable() is None:
        bindings += [
            Binding(model, LINEAR_LAYERS, base, "__call__", base.__call__, linear_layers.call)
            for base in vars(module).values()
            if isinstance(base, type) and import_module("transformers").PreTrainedModel in base.__bases__
            if base.__call__ is not linear_layers.call
        ]
    return bindings
