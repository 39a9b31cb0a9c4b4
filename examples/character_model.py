"""Train a character model with fast weights in place of attention, then let it write: about half a minute on a CPU.

python examples/character_model.py                      # learns Python's own documentation
python examples/character_model.py book.txt 1000        # your own text, and more steps
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

import fastweights as fw

BATCH, LENGTH, SIZE, LAYERS = 16, 128, 96, 3
text = Path(sys.argv[1]).read_text("utf-8") if sys.argv[1:] else "\n".join(topics.values())
steps = int(sys.argv[2]) if sys.argv[2:] else 150
characters = sorted(set(text))
tokens = torch.tensor([characters.index(character) for character in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.memory = fw.FastWeightAttention(SIZE, n_heads=4, rule="delta", feature_map="silu", normalization="l2")
        self.feedforward = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x, state=None):
        y, state = self.memory(self.norms[0](x), state)
        x = x + y
        return x + self.feedforward(self.norms[1](x)), state


class CharacterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(characters), SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, len(characters)))

    def forward(self, tokens, states=(None,) * LAYERS):
        x, states = self.embedding(tokens), list(states)
        for i, block in enumerate(self.blocks):
            x, states[i] = block(x, states[i])
        return self.head(x), states


model = CharacterModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, steps + 1):
    batch = tokens[torch.randint(len(tokens) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
    logits, _ = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step}: loss {loss.item():.2f} nats per character", flush=True)

token, states = tokens[:1].view(1, 1), (None,) * LAYERS
with torch.no_grad():
    for _ in range(300):  # one character at a time: the memory has the same size after any number of them
        logits, states = model(token, states)
        token = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)
        print(characters[token], end="")
print()
