"""What a translation model is made of: sizes, and the attention in each of its three positions."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from fastweights.common.tables import look_up
from fastweights.feature_maps import feature_map
from fastweights.layers.checks import head_size
from fastweights.layers.fast_weight import NORMALIZATIONS
from fastweights.models.configuration import ModelConfig
from fastweights.ops.rules import RULES

# The rows of Table 1: name -> feature map, None for softmax.
ATTENTIONS: dict[str, str | None] = {"softmax": None, "linear": "elu", "performer": "favor", "dpfp": "dpfp"}
POSITIONS = ("encoder", "decoder", "cross")


@dataclass(frozen=True, kw_only=True)
class TranslationModelConfig(ModelConfig):
    """An encoder-decoder of Vaswani et al.; `models.translation_presets` has the paper's. Idle fields are refused.

    Attributes:
        vocab_size: number of sub-words, one vocabulary and one matrix for source, target and softmax.
        d_model, n_heads, d_ff: sizes; a head has d_model / n_heads.
        encoder_layers, decoder_layers: how many.
        encoder, decoder, cross: the attention of the encoder, of the decoder to its past, and of the decoder to the
            source: "softmax", "linear" (ELU + 1), "performer" (FAVOR+) or "dpfp".
        features: performer: its number m of random features; 4 d_head if None, the paper's 256.
        nu: dpfp: its ν; 2 if None.
        redraw: performer: draw new features for each batch of training.
        rule: of the decoder's fast weights. The paper has "sum"; the encoder and the source are read as a whole, where
            there is no order in which a rule could correct.
        normalization: of the decoder's fast weights, see `FastWeightAttention`; the others have attention
            normalisation.
        dropout: on the embeddings and after every sublayer.
        inner_dropout: within the feed-forward layers.
        attention_dropout: on the weights of softmax attention.
        norm: LayerNorm "post" each residual sum as Vaswani et al., or "pre" each sublayer and once at the end.
    """

    d_model: int = 1024
    n_heads: int = 16
    d_ff: int = 4096
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder: str = "softmax"
    decoder: str = "softmax"
    cross: str = "softmax"
    features: int | None = None
    nu: int | None = None
    redraw: bool = True
    rule: str = "sum"
    normalization: str = "attention"
    dropout: float = 0.1
    inner_dropout: float = 0.0
    attention_dropout: float = 0.0
    norm: str = "post"

    def __post_init__(self) -> None:
        sizes = ("d_model", "n_heads", "d_ff", "encoder_layers", "decoder_layers")
        choices: dict[str, Iterable[str]] = {**dict.fromkeys(POSITIONS, ATTENTIONS), "norm": ("post", "pre")}
        choices |= {"rule": RULES, "normalization": NORMALIZATIONS}
        self.check_fields(sizes, ("dropout", "inner_dropout", "attention_dropout"), choices)
        head_size(self.d_model, self.n_heads, None)
        if self.d_model % 2:
            raise ValueError(f"d_model must be even for its sinusoidal positions, got {self.d_model}")
        self._refuse_idle()
        for attention in self.attentions:
            self.d_dot(attention)

    @property
    def attentions(self) -> tuple[str, str, str]:
        """Those of encoder, decoder and cross position."""
        return self.encoder, self.decoder, self.cross

    @property
    def d_head(self) -> int:
        """Size of a head's queries, keys and values: the paper's d_key."""
        return self.d_model // self.n_heads

    def map_options(self, attention: str) -> dict[str, Any]:
        """Return the options of the feature map of that attention.

        The kernel that FAVOR+ estimates is that of softmax attention, exp(q·k / sqrt(d_head)).
        """
        if attention == "performer":
            m = 4 * self.d_head if self.features is None else self.features
            return {"m": m, "orthogonal": True, "scale": True, "redraw": self.redraw}
        return {"nu": 2 if self.nu is None else self.nu} if attention == "dpfp" else {}

    def d_dot(self, attention: str) -> int:
        """Return the size of mapped keys and queries, App. E: d_head, 2 m for the performer, 2 ν d_head for DPFP."""
        phi = look_up(ATTENTIONS, attention, "attention")
        return self.d_head if phi is None else feature_map(phi, self.d_head, **self.map_options(attention)).dim

    def _refuse_idle(self) -> None:
        """Refuse fields that do nothing here and are not as they are by default."""
        defaults = {f.name: f.default for f in fields(self)}
        for name, where in idle_fields(*self.attentions).items():
            value = getattr(self, name)
            if value != defaults[name]:
                raise ValueError(
                    f"{name} = {value!r} is for {where}, and this model has {', '.join(self.attentions)} attention in "
                    "encoder, decoder and cross position; leave it out"
                )


def idle_fields(encoder: str, decoder: str, cross: str) -> dict[str, str]:
    """Return the fields that do nothing with those attentions, and what each is for."""
    attentions = (encoder, decoder, cross)
    used = {
        "features": ("performer" in attentions, "performer attention"),
        "redraw": ("performer" in attentions, "performer attention"),
        "nu": ("dpfp" in attentions, "dpfp attention"),
        "rule": (decoder != "softmax", "fast weights in the decoder"),
        "normalization": (decoder != "softmax", "fast weights in the decoder"),
        "attention_dropout": ("softmax" in attentions, "softmax attention"),
    }
    return {name: use for name, (needed, use) in used.items() if not needed}
