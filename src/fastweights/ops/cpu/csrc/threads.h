// PyTorch's threads, by two functions of its stable C interface. build.py hands them over when it loads the library,
// which therefore needs nothing of PyTorch to be built, and runs with every version that has them.
#pragma once

#include <cstdint>

using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

// Calls `work` for parts of [begin, end) on PyTorch's threads; returns 0 if all went well.
int32_t parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc work, void* context);

// As many as PyTorch uses.
int64_t number_of_threads();
