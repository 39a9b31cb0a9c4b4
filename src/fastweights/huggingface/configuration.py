"""Configurations for transformers: ours as they are, in one field, and the numbers of tokens beside the vocabulary."""

from __future__ import annotations

from typing import Any, Self

from transformers import PreTrainedConfig

from fastweights.data.pairs.bpe import BOS, EOS, PAD
from fastweights.models.language_model import LanguageModelConfig
from fastweights.models.translation_config import TranslationModelConfig


class FastWeightConfig(PreTrainedConfig):
    """A language model for transformers.

    Attributes:
        network: the fields of `LanguageModelConfig`.
        line_token_id: the token that ends a line. A text begins after one, so `bos_token_id` is read as this.

    The V tokens of the network are followed by `pad_token_id` = V and `bos_token_id` = `eos_token_id` = V + 1, so that
    `vocab_size` is V + 2. Padding is masked wherever it stands, and both have probability 0.
    """

    model_type = "fastweights"

    network: dict[str, Any] | None = None
    line_token_id: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.network is not None:
            ours = self.of_network
            self.vocab_size, self.hidden_size, self.num_hidden_layers = ours.vocab_size + 2, ours.d_model, ours.n_layers
            self.pad_token_id = ours.vocab_size
            self.bos_token_id = self.eos_token_id = ours.vocab_size + 1
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, network: LanguageModelConfig, line_token_id: int | None = None, **options: Any) -> Self:
        """Describe this language model; `options` are those of any `PreTrainedConfig`."""
        # Positions that are counted from the end of a window change with every token: nothing can be kept.
        streams = network.positions == "none" or network.position_direction == "forward"
        options = {"use_cache": streams, **options}
        return cls(network=network.to_dict(), line_token_id=line_token_id, **options)

    @property
    def of_network(self) -> LanguageModelConfig:
        """The configuration of the language model itself."""
        return LanguageModelConfig.from_dict(self.network or {})


class FastWeightTranslationConfig(PreTrainedConfig):
    """A translation model for transformers.

    Attributes:
        network: the fields of `TranslationModelConfig`.
    """

    model_type = "fastweights-translation"

    network: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = PAD
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    decoder_start_token_id: int | None = BOS

    def __post_init__(self, **kwargs: Any) -> None:
        if self.network is not None:
            ours = self.of_network
            self.vocab_size, self.hidden_size = ours.vocab_size, ours.d_model
            self.num_hidden_layers = ours.decoder_layers
        super().__post_init__(**kwargs)

    @classmethod
    def of(cls, network: TranslationModelConfig, **options: Any) -> Self:
        """Describe this translation model; `options` are those of any `PreTrainedConfig`."""
        return cls(network=network.to_dict(), **options)

    @property
    def of_network(self) -> TranslationModelConfig:
        """The configuration of the translation model itself."""
        return TranslationModelConfig.from_dict(self.network or {})
