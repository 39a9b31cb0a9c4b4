"""Replace attention by fast weights in GPT-2 from Hugging Face, train it a little, and let it write.

    pip install '.[hf]'
    python examples/huggingface_gpt2.py

The model is made from a configuration, so nothing is downloaded. To start from pretrained weights, replace the line
that makes it by `GPT2LMHeadModel.from_pretrained("gpt2")`. Embeddings and feed-forward layers keep what they have
learned; the new layers must be trained.
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import fastweights as fw


class FastWeightsForGPT2(nn.Module):
    """What a block of GPT-2 calls as its attention: hidden vectors (B, T, n_embd) to the same, and no weights."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.memory = fw.FastWeightAttention(config.n_embd, config.n_head, rule="delta", feature_map="dpfp")

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        y, _state = self.memory(hidden_states)
        return y, None


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256,
    n_positions=256,
    n_embd=64,
    n_layer=2,
    n_head=4,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config)
for block in model.transformer.h:
    block.attn = FastWeightsForGPT2(config)

text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(1, 61):
    tokens = text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(64)]
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.2f} nats per byte")

written = model.eval().generate(text[None, :20], max_new_tokens=60, do_sample=True, pad_token_id=0)
print(bytes(written[0].tolist()).decode(errors="replace"))
