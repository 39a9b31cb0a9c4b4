"""The adaptive softmax in fused GPU kernels; the plain form is `ops.losses.adaptive_softmax`."""
