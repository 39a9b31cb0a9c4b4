"""The memory's kernels, in Triton and Gluon."""
