"""The calls of other libraries, answered by the kernels of this one."""
