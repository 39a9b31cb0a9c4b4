#include "threads.h"

#include <pthread.h>

namespace {

int32_t (*torch_parallel_for)(int64_t, int64_t, int64_t, ParallelFunc, void*) = nullptr;
int32_t (*torch_get_num_threads)(uint32_t*) = nullptr;

// A forked process has the thread that forked and no other, and GNU's OpenMP, on which PyTorch builds, waits for the
// others forever.
bool forked = false;

}  // namespace

extern "C" void fastweights_threads(decltype(torch_parallel_for) parallel, decltype(torch_get_num_threads) number) {
  if (!torch_parallel_for) pthread_atfork(nullptr, nullptr, [] { forked = true; });
  torch_parallel_for = parallel;
  torch_get_num_threads = number;
}

int64_t number_of_threads() {
  uint32_t number = 1;
  if (!forked) torch_get_num_threads(&number);
  return number;
}

int32_t parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc work, void* context) {
  if (!forked) return torch_parallel_for(begin, end, grain_size, work, context);
  if (begin < end) work(begin, end, context);
  return 0;
}
