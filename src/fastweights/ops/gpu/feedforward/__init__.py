"""The feed-forward layer in fused GPU kernels."""
