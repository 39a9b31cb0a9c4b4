"""Train one fast-weight layer to recall the last value of a key, with the sum rule and with the delta rule.

Keys return with new values within a sequence, so the memory has to overwrite; the sum rule can only add.
"""

import torch
from torch.nn.functional import cross_entropy, one_hot

import fastweights as fw

S, PAIRS, BATCH, STEPS = 8, 24, 64, 400


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """PAIRS tokens of one-hot key and value, then a key alone; the target is the value it had last."""
    keys, values = (torch.randint(S, (BATCH, PAIRS), generator=generator) for _ in range(2))
    x = torch.cat([one_hot(keys, S), one_hot(values, S)], -1).float()
    query = torch.cat([x[:, :1, :S], torch.zeros(BATCH, 1, S)], -1)
    last = PAIRS - 1 - (keys == keys[:, :1]).flip(1).long().argmax(1)
    return torch.cat([x, query], 1), values[torch.arange(BATCH), last]


def train(rule: str) -> float:
    """Share of right answers in the last twenty batches."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    embed, head = torch.nn.Linear(2 * S, 32), torch.nn.Linear(32, S)
    layer = fw.FastWeightAttention(32, n_heads=1, rule=rule, feature_map="dpfp")
    parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    right = []
    for _ in range(STEPS):
        x, target = batch(generator)
        y, _ = layer(embed(x))
        logits = head(y[:, -1])
        optimizer.zero_grad()
        cross_entropy(logits, target).backward()
        optimizer.step()
        right.append((logits.argmax(-1) == target).float().mean().item())
    return sum(right[-20:]) / 20


for rule in ("sum", "delta"):
    print(f"{rule} rule: {train(rule):.0%} right after {STEPS} steps")
