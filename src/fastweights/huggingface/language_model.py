"""Our language model as a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastweights.huggingface.cache import FastWeightCache
from fastweights.huggingface.configuration import FastWeightConfig
from fastweights.models.language_model import LanguageModel

# What losses leave out, in all of transformers.
IGNORED = -100


class FastWeightModel(PreTrainedModel):
    """What language and translation models share: weights that their network draws itself, and a cache of our own."""

    base_model_prefix = "network"
    main_input_name = "input_ids"
    _no_split_modules = ("Block", "EncoderLayer", "DecoderLayer")

    def _init_weights(self, module: Any) -> None:
        """Leave weights as the network drew them when it was made."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:
        """Give `generate` a cache, unless it has one or wants none."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation = {generation_config.cache_implementation!r} does nothing here: the cache of "
                "this model is a FastWeightCache; leave it out"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FastWeightCache()
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()


class FastWeightForCausalLM(FastWeightModel, GenerationMixin):
    """Our `LanguageModel`, in `.network`, with the calls of transformers.

    Its logits are log-probabilities. `past_key_values` is a `FastWeightCache`; with fast weights it has one size
    however long the text.
    """

    config_class = FastWeightConfig

    def __init__(self, config: FastWeightConfig) -> None:
        super().__init__(config)
        self.network = LanguageModel(config.of_network)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return log p of the token after each of input_ids (B, T), and the loss if there are labels.

        Args:
            input_ids: tokens; padding where they are `config.pad_token_id`.
            attention_mask: (B, T), or with the tokens before in front: 0 for padding, which is left out.
            past_key_values: what an earlier call returned, which these tokens continue.
            labels: (B, T), input_ids in most cases, and -100 where nothing is learnt. They are shifted here. In
                training the loss is all that is computed: logits are None.
            use_cache: whether to return a cache; by default as in the configuration, and not in training.
            logits_to_keep: how many of the last tokens to predict after, 0 for all; or which.
            num_items_in_batch: what the summed losses are divided by; by default the number of labels.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (B, T), got {tuple(input_ids.shape)}")
        T, keep = input_ids.shape[1], self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = FastWeightCache() if past_key_values is None else FastWeightCache.of(past_key_values)
        tokens, mask = self._own_tokens(input_ids, attention_mask)
        read, read_mask = cache.take(tokens, mask)
        hidden, cache.state = self.network(read, cache.state, mask=read_mask)
        hidden = hidden[:, -T:]
        loss = None if labels is None else self._loss(hidden, labels, num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            # Padding and the beginning of a text are never predicted.
            logits = F.pad(self.network.softmax.log_prob(hidden[:, kept]), (0, 2), value=-torch.inf)
        returned = cache if keep or past_key_values is not None else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=returned)

    def _own_tokens(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return tokens of the network's vocabulary, and which count; None for all."""
        config = self.config
        mask = input_ids != config.pad_token_id
        if attention_mask is not None:
            mask = mask & attention_mask[:, -input_ids.shape[1] :].bool()
        start = input_ids == config.bos_token_id
        if bool(start.any()):
            if config.line_token_id is None:
                raise ValueError(f"token {config.bos_token_id} begins a text, and config.line_token_id says as what")
            input_ids = input_ids.masked_fill(start, config.line_token_id)
        return input_ids.masked_fill(~mask, 0), None if bool(mask.all()) else mask

    def _loss(self, hidden: Tensor, labels: Tensor, count: int | Tensor | None) -> Tensor:
        """Return the mean of -log p of labels (B, T), each after the token before it."""
        hidden, labels = hidden[:, :-1], labels[:, 1:]
        counts = labels != IGNORED
        losses = self.network.softmax(hidden, labels.masked_fill(~counts, 0))
        total = torch.where(counts, losses, 0).sum()
        return total / (counts.sum() if count is None else count)
