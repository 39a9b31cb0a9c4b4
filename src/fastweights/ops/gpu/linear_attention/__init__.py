"""Linear attention without a direction of time in fused GPU kernels."""
