"""The mathematics and its kernels. Imports nothing of the package but itself."""
