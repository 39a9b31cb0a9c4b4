"""The kernels for GPUs, a folder for each operation."""
