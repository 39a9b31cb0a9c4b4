"""Fill a memory, look at what it contains, and edit it, with `fw.probe` on random associations."""

import torch

import fastweights as fw

torch.manual_seed(0)
N, D, M = 12, 16, 8
keys = torch.randn(1, N, 1, D, dtype=torch.float64)
keys, values = fw.l2_normalize(keys), torch.randn(1, N, 1, M, dtype=torch.float64)
gates = {"sum": {}, "delta": {"beta": torch.ones(1, N, 1, dtype=torch.float64)}}

for rule, gate in gates.items():
    _, state = fw.fast_weight_memory(keys, keys, values, rule=rule, **gate)
    error = fw.probe.recall(state, keys, values).error.flatten()
    rank = fw.probe.effective_rank(state).item()
    print(f"{rule} rule: error {error.mean():.2f} on average, {error[-1]:.2f} for the last; effective rank {rank:.1f}")

    parts = fw.probe.attribute(keys, keys, values, rule=rule, **gate)
    shares = parts.shares[0, 0, -1]
    print(f"  the last read is {shares[-1]:.0%} the last write and {shares[:-1].sum():.0%} the others")

    edited = fw.probe.overwrite(state, keys[:, :1], values[:, 1:2])
    error = fw.probe.recall(edited, keys[:, :1], values[:, 1:2]).error.item()
    print(f"  after an edit the first key answers with the second value, error {error:.0e}")

held = {rule: fw.probe.capacity(rule, d_key=D, bound=0.5).held for rule in ("sum", "delta", "gated")}
print(f"associations held with an error below one half: {held}")
