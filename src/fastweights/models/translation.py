"""The encoder-decoder of Sec. 6.2 and App. E, with softmax attention or fast weights in each of its three positions.

B sentences, S tokens of source, T tokens of target, N rows of decoding (n beams of each sentence), V sub-words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastweights.layers.cross_attention import CrossAttention, FastWeightCrossAttention, SoftmaxCrossAttention
from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.layers.feedforward import FeedForward
from fastweights.layers.mixers import StackState
from fastweights.layers.positions import encode_positions
from fastweights.layers.softmax import SoftmaxAttention
from fastweights.models.configuration import check_numbers
from fastweights.models.translation_config import ATTENTIONS, TranslationModelConfig
from fastweights.ops.losses.label_smoothing import smoothed_nll
from fastweights.ops.state import State


@dataclass(eq=False)
class Encoded(State):
    """A batch of source sentences as the encoder left them: (B, S, d_model), and which tokens are no padding."""

    x: Tensor
    mask: Tensor | None = None


@dataclass(eq=False)
class TranslationState:
    """What decoding carries: the source, a row for each sentence, and the past, a row for each beam.

    Attributes:
        source: what the encoder left, until the decoder has read it; then one memory a layer. With fast weights those
            are of one size for any sentence.
        past: the decoder's own; None before its first token. Rows of one sentence are neighbours.
    """

    source: Encoded | list[State]
    past: StackState | None = None

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> "TranslationState":
        """Move row `rows[i]` to row i, so that beams can fork; sentences likewise, None to leave them as they are."""
        source = self.source
        if sentences is not None:
            if isinstance(source, Encoded):
                source = source.reorder(sentences)
            else:
                source = [memory.reorder(sentences) for memory in source]
        return TranslationState(source, None if self.past is None else self.past.reorder(rows))

    @property
    def nbytes(self) -> int:
        """Bytes held, of the source and of the past."""
        sources = [self.source] if isinstance(self.source, Encoded) else self.source
        return sum(memory.nbytes for memory in sources) + (0 if self.past is None else self.past.nbytes)


def _attention(config: TranslationModelConfig, attention: str) -> CrossAttention:
    phi = ATTENTIONS[attention]
    if phi is None:
        return SoftmaxCrossAttention(config.d_model, config.n_heads, dropout=config.attention_dropout)
    options = config.map_options(attention)
    return FastWeightCrossAttention(config.d_model, config.n_heads, feature_map=phi, feature_map_options=options)


def _causal(config: TranslationModelConfig) -> nn.Module:
    phi = ATTENTIONS[config.decoder]
    if phi is None:
        return SoftmaxAttention(config.d_model, config.n_heads, dropout=config.attention_dropout)
    return FastWeightAttention(
        config.d_model,
        config.n_heads,
        rule=config.rule,
        feature_map=phi,
        normalization=config.normalization,
        feature_map_options=config.map_options(config.decoder),
    )


class Layer(nn.Module):
    """What layers of encoder and decoder share: sublayers with a residual, and a LayerNorm after or before each."""

    def __init__(self, config: TranslationModelConfig) -> None:
        super().__init__()
        self.feedforward = FeedForward(config.d_model, config.d_ff, config.dropout, config.inner_dropout)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return what a sublayer reads."""
        return norm(x) if self.pre else x

    def after(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return x with what a sublayer gave."""
        return x + y if self.pre else norm(x + y)

    def finish(self, x: Tensor) -> Tensor:
        """Run the feed-forward sublayer, last in both."""
        return self.after(self.feedforward_norm, x, self.feedforward(self.before(self.feedforward_norm, x)))


class EncoderLayer(Layer):
    """Every token reads the whole sentence; then feed-forward."""

    def __init__(self, config: TranslationModelConfig) -> None:
        super().__init__(config)
        self.attention = _attention(config, config.encoder)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map x (B, S, d_model) to (B, S, d_model)."""
        h = self.before(self.attention_norm, x)
        y = self.attention(h, self.attention.remember(h, mask))
        return self.finish(self.after(self.attention_norm, x, self.dropout(y)))


class DecoderLayer(Layer):
    """Every token reads the target before it, then the source; then feed-forward."""

    def __init__(self, config: TranslationModelConfig) -> None:
        super().__init__(config)
        self.attention = _causal(config)
        self.cross = _attention(config, config.cross)
        self.cross_norm = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, source: Encoded | State, past: State | None) -> tuple[Tensor, State, State]:
        """Map x (N, T, d_model) to (N, T, d_model); return also the memory of the source, and the state after x.

        The source comes as the encoder left it the first time; afterwards its memory is all that is needed.
        """
        memory = self.cross.remember(source.x, source.mask) if isinstance(source, Encoded) else source
        y, after = self.attention(self.before(self.attention_norm, x), past)
        x = self.after(self.attention_norm, x, self.dropout(y))
        y = self.cross(self.before(self.cross_norm, x), memory)
        x = self.after(self.cross_norm, x, self.dropout(y))
        return self.finish(x), memory, after


# Without cuDNN, which plans anew for every shape: a cache grows by a token, batches have their own lengths, and the
# planning takes longer than the attention of a sentence.
ANY_LENGTH = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class TranslationModel(nn.Module):
    """Probabilities of a target sentence given a source: whole for training, token by token for decoding.

    Equivalent to, with post-LN layers,

        x = dropout(embedding[source] * sqrt(d_model) + positions)
        for layer in encoder:
            x = LN(x + dropout(attend(x, x)))
            x = LN(x + dropout(W_2 relu(W_1 x + b_1) + b_2))
        y = dropout(embedding[target] * sqrt(d_model) + positions)
        for layer in decoder:
            y = LN(y + dropout(causal(y)))
            y = LN(y + dropout(attend(y, x)))
            y = LN(y + dropout(W_2 relu(W_1 y + b_1) + b_2))
        logits = y @ embedding.T

    Sentences of a batch are padded on the right; `mask` (B, S) says where the source has tokens. Padding leaves no
    trace in what is computed for tokens.
    """

    def __init__(self, config: TranslationModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # Post-LN layers end in a LayerNorm already.
        final = nn.LayerNorm if config.norm == "pre" else nn.Identity
        self.encoder_norm, self.decoder_norm = final(config.d_model), final(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        """Draw Glorot's uniform weights, as Vaswani et al., and embeddings from N(0, 1 / d_model)."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, source: Tensor, mask: Tensor | None, target: Tensor) -> Tensor:
        """Return logits (B, T, V) of the token after each of target (B, T), given source (B, S) and its mask (B, S)."""
        hidden, _ = self._decode(target, self.encode(source, mask))
        return self.logits(hidden)

    def loss(
        self, source: Tensor, mask: Tensor | None, target: Tensor, following: Tensor, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return losses (B, T) in nats of the tokens `following` each of target, with label smoothing and without.

        Equivalent to

            log_p = log_softmax(model(source, mask, target), -1)
            nll = -log_p[following]
            (1 - smoothing) * nll - smoothing * log_p.mean(-1), nll
        """
        return smoothed_nll(self(source, mask, target), following, smoothing)

    @ANY_LENGTH
    def encode(self, source: Tensor, mask: Tensor | None = None) -> TranslationState:
        """Read source sentences (B, S), once: the state that decoding begins with."""
        self._check(source, "source")
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        return TranslationState(Encoded(self.encoder_norm(x), mask))

    def decode(self, target: Tensor, state: TranslationState) -> tuple[Tensor, TranslationState]:
        """Return logits (N, T, V) of the token after each of target (N, T), which continues the state, and the next."""
        if self.training and state.past is not None and any(getattr(m, "redraws", False) for m in self.modules()):
            raise ValueError(
                "performer attention draws new features for each call in training, with which an earlier state cannot "
                "be read; set redraw = False, or call model.eval()"
            )
        hidden, state = self._decode(target, state)
        return self.logits(hidden), state

    def step(self, token: Tensor, state: TranslationState) -> tuple[Tensor, TranslationState]:
        """Return log p (N, V), at least float32, of the token after token (N,), and the state.

        With fast weights the state never grows, and the time for a token does not depend on either sentence.
        """
        if token.dim() != 1:
            raise ValueError(f"token must have shape (N,), got {tuple(token.shape)}; rows of tokens go through decode")
        logits, state = self.decode(token.unsqueeze(1), state)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.squeeze(1).to(wide).log_softmax(-1), state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return unnormalised log p (..., V) from hidden vectors (..., d_model)."""
        return F.linear(hidden, self.embedding.weight)

    @property
    def n_parameters(self) -> int:
        """Numbers to be learnt; the one matrix of embeddings counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @ANY_LENGTH
    def _decode(self, target: Tensor, state: TranslationState) -> tuple[Tensor, TranslationState]:
        self._check(target, "target")
        seen = target.new_zeros(len(target)) if state.past is None else state.past.position
        y = self._embed(target, None if state.past is None else seen)
        sources: Sequence[Any] = state.source if isinstance(state.source, list) else [state.source] * len(self.decoder)
        pasts: Sequence[Any] = [None] * len(self.decoder) if state.past is None else state.past.layers
        memories, after = [], []
        for layer, source, past in zip(self.decoder, sources, pasts, strict=True):
            y, memory, new = layer(y, source, past)
            memories.append(memory)
            after.append(new)
        return self.decoder_norm(y), TranslationState(memories, StackState(after, seen + target.shape[1]))

    def _embed(self, tokens: Tensor, start: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) * self.config.d_model**0.5
        return self.dropout(x + encode_positions(x, "forward", start))

    def _check(self, tokens: Tensor, what: str) -> None:
        if tokens.dim() != 2 or 0 in tokens.shape:
            raise ValueError(f"{what} must be rows of tokens, at least one by one, got shape {tuple(tokens.shape)}")
        check_numbers(tokens, self.config.vocab_size, what, "token")
