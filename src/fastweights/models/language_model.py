"""The decoder-only language model of Sec. 6.3: a stack of any sequence layer under an adaptive softmax.

B rows of text, T tokens, V words.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.feature_maps import FEATURE_MAPS
from fastweights.layers.adaptive import AdaptiveSoftmax, check_cutoffs
from fastweights.layers.checks import head_size
from fastweights.layers.fast_weight import NORMALIZATIONS, OUTPUT_NORMS
from fastweights.layers.feedforward import FeedForward
from fastweights.layers.mixers import MIXERS, StackState, mixer
from fastweights.layers.positions import DIRECTIONS, POSITIONS, encode_positions
from fastweights.layers.relative import RelativeAttention
from fastweights.models.configuration import ModelConfig, check_numbers
from fastweights.ops.rules import RULES
from fastweights.ops.state import State, register_state

NAMES: dict[str, Collection[str]] = {
    "mixer": tuple(MIXERS),
    "rule": RULES,
    "feature_map": FEATURE_MAPS,
    "normalization": tuple(NORMALIZATIONS),
    "output_norm": tuple(OUTPUT_NORMS),
    "positions": POSITIONS,
    "position_direction": DIRECTIONS,
    "norm": ("post", "pre"),
}


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(ModelConfig):
    """What a language model is made of; `models.presets` has the paper's. A field that would do nothing is refused.

    Attributes:
        vocab_size: number of words, the frequent ones first.
        cutoffs: where the clusters of the adaptive softmax begin; none for a plain softmax.
        d_model: size of the hidden vectors.
        n_layers: number of blocks.
        n_heads: heads of each sequence layer.
        d_head: size of a head; d_model / n_heads if None.
        d_ff: size inside the feed-forward layers.
        dropout: after the embedding, in every sublayer and before the softmax.
        attention_dropout: on the attention weights of mixers that have such weights.
        mixer: the sequence layer, a name from `layers.mixers.MIXERS`.
        rule: of mixer "fast_weight", as are the next three; see `FastWeightAttention`.
        feature_map: its feature map.
        feature_map_options: arguments of the feature map.
        normalization: its normalisation.
        output_scale: multiply what is read from fast weights by d_head ** -0.5. The authors' code does, the paper does
            not say so.
        short_conv, beta_max, decay_per, output_norm: of mixer "fast_weight"; see `FastWeightAttention`.
        mem_len: of mixer "relative"; see `RelativeAttention`.
        clamp_len: of mixer "relative", too.
        positions: "none", or "sinusoid" added to the embedding.
        position_direction: "backward" gives the last token of each window position 0, as the authors' code does;
            "forward" counts from the first token, and can continue in a later segment.
        norm: LayerNorm "post" each residual sum, as the paper's models have it, or "pre" each sublayer with one more
            before the softmax.
        tied: one matrix for input embedding and softmax.
        init_std: standard deviation of all initial weights.
    """

    ADDED = ("short_conv", "beta_max", "decay_per", "output_norm")

    cutoffs: tuple[int, ...] = ()
    d_model: int = 128
    n_layers: int = 16
    n_heads: int = 8
    d_head: int | None = None
    d_ff: int = 2048
    dropout: float = 0.1
    attention_dropout: float = 0.0
    mixer: str = "fast_weight"
    rule: str = "delta"
    feature_map: str = "elu"
    feature_map_options: Mapping[str, Any] = field(default_factory=dict)
    normalization: str = "sum"
    output_scale: bool = False
    short_conv: int = 0
    beta_max: float = 1.0
    decay_per: str | None = None
    output_norm: str = "none"
    mem_len: int = 0
    clamp_len: int | None = None
    positions: str = "none"
    position_direction: str = "backward"
    norm: str = "post"
    tied: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self.check_fields(("d_model", "n_layers", "n_heads", "d_ff"), ("dropout", "attention_dropout"), NAMES)
        head_size(self.d_model, self.n_heads, self.d_head)
        if self.init_std < 0:
            raise ValueError(f"init_std must be at least 0, got {self.init_std}")
        if self.positions == "sinusoid" and self.d_model % 2:
            raise ValueError(f"d_model must be even for positions = 'sinusoid', got {self.d_model}")
        # Frozen, so that a list from JSON has to be made a tuple this way.
        object.__setattr__(self, "cutoffs", check_cutoffs(self.cutoffs, self.vocab_size))
        object.__setattr__(self, "feature_map_options", dict(self.feature_map_options))
        for option in fields(self):
            users = [name for name, kind in MIXERS.items() if option.name in kind.options]
            value, default = getattr(self, option.name), {} if option.default is MISSING else option.default
            if users and self.mixer not in users and value != default:
                raise ValueError(
                    f"{option.name} = {value!r} does nothing with mixer {self.mixer!r}; leave it at its default, "
                    f"or use mixer {' or '.join(map(repr, users))}"
                )


def check_forgets(config: LanguageModelConfig) -> None:
    """Refuse a model that cannot begin a new text in the middle of a segment."""
    if not MIXERS[config.mixer].forgets:
        able = " or ".join(repr(name) for name, kind in MIXERS.items() if kind.forgets)
        raise ValueError(
            f"mixer {config.mixer!r} does not forget where a document begins; leave documents as they are "
            f"(documents 'none'), or use mixer {able}"
        )
    if config.positions != "none":
        raise ValueError(
            f"positions = {config.positions!r} do not begin anew with a document; take positions 'none', or leave "
            "documents as they are (documents 'none')"
        )


@register_state
class LanguageModelState(StackState):
    """What a language model carries from one segment or token to the next."""


class Block(nn.Module):
    """Sequence layer, then feed-forward, each with dropout and a residual: LN(x + sub(x)), or x + sub(LN(x))."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        options = {name: getattr(config, name) for name in MIXERS[config.mixer].options}
        d_head = head_size(config.d_model, config.n_heads, config.d_head)
        self.mixer = mixer(config.mixer, config.d_model, config.n_heads, d_head, **options)
        self.feedforward = FeedForward(config.d_model, config.d_ff, config.dropout)
        self.mixer_norm, self.feedforward_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(
        self, x: Tensor, state: State | None = None, starts: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Map x (B, T, d_model) to y (B, T, d_model), and return the state."""
        marks = {name: value for name, value in (("starts", starts), ("mask", mask)) if value is not None}
        return self._run(partial(self.mixer, **marks), x, state)

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Map x (B, d_model) to y (B, d_model), and return the state."""
        return self._run(self.mixer.step, x, state)  # type: ignore[arg-type]

    def _run(
        self, mix: Callable[[Tensor, State | None], tuple[Tensor, State]], x: Tensor, state: State | None
    ) -> tuple[Tensor, State]:
        y, state = mix(self.mixer_norm(x) if self.pre else x, state)
        x = x + self.dropout(y)
        if self.pre:
            return x + self.feedforward(self.feedforward_norm(x)), state
        x = self.mixer_norm(x)
        return self.feedforward_norm(x + self.feedforward(x)), state


class LanguageModel(nn.Module):
    """Next-word probabilities, for whole windows, for segments with a carried state, and token by token.

    Equivalent to, with post-LN blocks,

        x = dropout(embedding[tokens] * sqrt(d_model) + positions)
        for block in blocks:
            x = LN(x + dropout(mixer(x)))
            x = LN(x + dropout(W_2 dropout(relu(W_1 x + b_1)) + b_2))
        nll = adaptive_softmax(dropout(x), targets)
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.softmax = AdaptiveSoftmax(config.vocab_size, config.d_model, config.cutoffs)
        self.embedding = None if config.tied else nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        # Post-LN blocks end in a LayerNorm already.
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        """Draw weights from N(0, init_std²), LayerNorm's from N(1, init_std²), with biases 0: the authors' code."""
        std = self.config.init_std
        if isinstance(module, AdaptiveSoftmax):
            module.reset_parameters(std)
        elif isinstance(module, RelativeAttention):
            nn.init.normal_(module.u, std=std)
            nn.init.normal_(module.v, std=std)
        elif isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0 if isinstance(module, nn.LayerNorm) else 0.0, std)
            if not isinstance(module, nn.Embedding) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        state: LanguageModelState | None = None,
        starts: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, LanguageModelState]:
        """Return hidden vectors (B, T, d_model) of tokens (B, T), from which the next are predicted, and the state.

        `state` from an earlier call makes `tokens` the continuation of what it saw; gradients flow into it, so
        `state.detach()` first to train without them. Where `starts` (B, T) is True a new text begins, and all that came
        before is forgotten. Where `mask` (B, T) is False a token is padding, on any side, and changes nothing.
        """
        self._check(tokens, state, 2, "(B, T)")
        if mask is not None and self.config.positions != "none":
            raise ValueError(
                f"positions = {self.config.positions!r} count padding too, so this model takes no mask; give it rows "
                "without padding, one by one if their lengths differ"
            )
        if starts is not None:
            check_forgets(self.config)
        x = self._embed(tokens, state)
        states = []
        for block, past in zip(self.blocks, self._past(state), strict=True):
            x, new = block(x, past, starts, mask)
            states.append(new)
        seen = tokens.new_zeros(len(tokens)) if state is None else state.position
        return self.dropout(self.final_norm(x)), LanguageModelState(states, seen + tokens.shape[1])

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        state: LanguageModelState | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, LanguageModelState]:
        """Return -log p(target) in nats (B, T) for targets (B, T), the words after `tokens`, and the state."""
        hidden, state = self(tokens, state, starts)
        return self.softmax(hidden, targets), state

    def step(self, token: Tensor, state: LanguageModelState | None = None) -> tuple[Tensor, LanguageModelState]:
        """Return log p (B, V) of the word after token (B,), and the state, which for fast weights never grows."""
        self._check(token, state, 1, "(B,)")
        x = self._embed(token.unsqueeze(1), state, stream=True).squeeze(1)
        states = []
        for block, past in zip(self.blocks, self._past(state), strict=True):
            x, new = block.step(x, past)  # type: ignore[operator]
            states.append(new)
        seen = torch.zeros_like(token) if state is None else state.position
        return self.softmax.log_prob(self.dropout(self.final_norm(x))), LanguageModelState(states, seen + 1)

    def set_memory(self, mem_len: int, clamp_len: int | None = None) -> None:
        """Remember `mem_len` inputs per layer from now on: Table 4 evaluates one Transformer-XL with several."""
        if self.config.mixer != "relative":
            raise ValueError(f"only mixer 'relative' has a memory length, this model's is {self.config.mixer!r}")
        if mem_len < 0:
            raise ValueError(f"mem_len must be at least 0, got {mem_len}")
        for module in self.modules():
            if isinstance(module, RelativeAttention):
                module.mem_len, module.clamp_len = mem_len, clamp_len

    def state_size(self, segment: int = 1) -> int:
        """Count the numbers kept of the past for one row, as Table 4 and App. F do.

        Fast weights: n_layers x n_heads x d_dot x d_value, without the accumulator of attention normalisation.
        Attention: n_layers x (mem_len + segment) x 2 n_heads d_head, its keys and values while it reads a segment; the
        product of the two lengths in App. F is a misprint.
        """
        size = MIXERS[self.config.mixer].size
        return sum(size(block.mixer, segment) for block in self.blocks)

    @property
    def n_parameters(self) -> int:
        """Numbers to be learnt; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _embed(self, tokens: Tensor, state: LanguageModelState | None, stream: bool = False) -> Tensor:
        weight = self.softmax.weight if self.embedding is None else self.embedding.weight
        x = F.embedding(tokens, weight) * self.config.d_model**0.5
        if self.config.positions == "none":
            return self.dropout(x)
        direction = self.config.position_direction
        if direction == "backward" and (stream or state is not None):
            raise ValueError(
                "positions run backward from the end of a window, so this model can neither continue a state nor read "
                "token by token: give it whole windows, or train with positions = 'none' or position_direction = "
                "'forward'"
            )
        return self.dropout(x + encode_positions(x, direction, None if state is None else state.position))

    def _past(self, state: LanguageModelState | None) -> list[State] | list[None]:
        return [None] * len(self.blocks) if state is None else state.layers

    def _check(self, tokens: Tensor, state: LanguageModelState | None, dim: int, shape: str) -> None:
        if tokens.dim() != dim or 0 in tokens.shape:
            hints = {1: "; one token per row goes through step", 2: "; whole rows go through forward"}
            raise ValueError(f"tokens must have shape {shape}, got {tuple(tokens.shape)}{hints.get(tokens.dim(), '')}")
        check_numbers(tokens, self.config.vocab_size, "tokens", "word")
        if state is None:
            return
        if not isinstance(state, LanguageModelState) or len(state.layers) != len(self.blocks):
            got = f"{len(state.layers)} layers" if isinstance(state, LanguageModelState) else type(state).__name__
            raise ValueError(f"state must be a LanguageModelState of {len(self.blocks)} layers or None, got {got}")
        if dim == 2 and self.training and any(getattr(m, "redraws", False) for m in self.modules()):
            raise ValueError(
                f"feature map {self.config.feature_map!r} draws new features for each call in training, with which a "
                "carried state cannot be read; set feature_map_options = {'redraw': False} or train without a state"
            )
