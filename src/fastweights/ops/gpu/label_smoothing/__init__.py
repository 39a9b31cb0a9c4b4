"""The losses of a softmax with label smoothing in fused GPU kernels; the plain form is in `ops.losses`."""
