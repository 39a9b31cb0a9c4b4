"""Our translation model as a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from fastweights.huggingface.cache import FastWeightCache
from fastweights.huggingface.configuration import FastWeightTranslationConfig
from fastweights.huggingface.language_model import IGNORED, FastWeightModel
from fastweights.models.translation import Encoded, TranslationModel, TranslationState


class Encoder(nn.Module):
    """The encoder of a translation model by itself, which `generate` calls once."""

    def __init__(self, network: TranslationModel) -> None:
        super().__init__()
        # In a tuple, so that it is no part of this module: its weights belong to the model.
        self._network = (network,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """Read source sentences (B, S); attention_mask (B, S) is 0 for padding."""
        mask = None if attention_mask is None else attention_mask.bool()
        encoded = self._network[0].encode(input_ids, mask).source
        assert isinstance(encoded, Encoded)
        return BaseModelOutput(last_hidden_state=encoded.x)


class FastWeightForSeq2SeqLM(FastWeightModel, GenerationMixin):
    """Our `TranslationModel`, in `.network`, with the calls of transformers."""

    config_class = FastWeightTranslationConfig

    def __init__(self, config: FastWeightTranslationConfig) -> None:
        super().__init__(config)
        self.network = TranslationModel(config.of_network)
        self.post_init()
        # As in our own search, neither is ever written.
        self.generation_config.suppress_tokens = [config.pad_token_id, config.bos_token_id]

    def get_encoder(self, *_: Any, **__: Any) -> Encoder:
        """Return the encoder by itself."""
        return Encoder(self.network)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return what the decoder reads to predict labels (B, T): they follow each other after the start."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.config.pad_token_id)], 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: FastWeightCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        """Return logits of the token after each of decoder_input_ids (B, T), and the loss if there are labels.

        Args:
            input_ids: source sentences (B, S), padded on the right.
            attention_mask: (B, S), 0 for padding.
            decoder_input_ids: targets from their start; made from the labels if None.
            encoder_outputs: what `get_encoder()` gave for the source, in the place of input_ids.
            past_key_values: what an earlier call returned, which these targets continue.
            labels: (B, T) target sentences, and -100 where nothing is learnt.
            use_cache: whether to return a cache; by default as in the configuration, and not in training.
            num_items_in_batch: what the summed losses are divided by; by default the number of labels.
        """
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if decoder_input_ids is None:
            raise ValueError("give decoder_input_ids, or labels to make them from")
        cache = FastWeightCache() if past_key_values is None else FastWeightCache.of(past_key_values)
        if encoder_outputs is None and cache.state is None:
            if input_ids is None:
                raise ValueError("give input_ids, the source, or encoder_outputs")
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        read, _mask = cache.take(decoder_input_ids, None)
        if cache.state is None and encoder_outputs is not None:
            there = None if attention_mask is None else attention_mask.bool()
            cache.state = TranslationState(Encoded(encoder_outputs[0], there))
        logits, cache.state = self.network.decode(read, cache.state)
        logits = logits[:, -decoder_input_ids.shape[1] :]
        loss = None
        if labels is not None:
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = losses / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
        keep = self.config.use_cache and not self.training if use_cache is None else use_cache
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache if keep or past_key_values is not None else None,
            encoder_last_hidden_state=None if encoder_outputs is None else encoder_outputs[0],
        )
