"""The short convolution in fused GPU kernels; the plain form is in `ops.fused`."""
