"""The memory on a CPU, in C++."""
