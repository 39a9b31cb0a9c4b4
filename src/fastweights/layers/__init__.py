"""Sequence layers: fast weights and the baselines, all with `forward(x, state)` and `step(x_t, state)`."""
