"""Feature maps and normalisations of queries and keys in fused GPU kernels; the plain form is in `ops.fused`."""
