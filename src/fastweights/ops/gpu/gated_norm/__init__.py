"""The gated root-mean-square norm in fused GPU kernels; the plain form is in `ops.fused`."""
