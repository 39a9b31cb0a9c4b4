// PyTorch's threads, by two functions of its stable C interface. build.py hands them over when it loads the library,
// which therefore needs nothing of PyTorch to be built, and runs with every version that has them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

// Calls `work` for parts of [begin, end) on PyTorch's threads; returns 0 if all went well.
int32_t parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc work, void* context);

// As many as PyTorch uses.
int64_t number_of_threads();

// Calls work(i) for all i < count, on several threads where `size`, the numbers to read and write, is worth that.
template <class Work>
void for_each_job(int64_t count, int64_t size, const Work& work) {
  constexpr int64_t kWorthAThread = 1 << 15;
  struct Shared {
    const Work& work;
    const int64_t count;
    std::atomic<int64_t> next{0};
  } shared{work, count};
  // Volatile, so that there is one copy of the work: a second one, for one thread, may round in another order.
  ParallelFunc volatile worker = [](int64_t, int64_t, void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    for (int64_t i; (i = shared.next++) < shared.count;) shared.work(i);
  };
  const int64_t most = std::min(count, size / kWorthAThread);
  const int64_t threads = most < 2 ? 1 : std::min(most, number_of_threads());
  if (threads < 2) worker(0, 1, &shared);
  else parallel_for(0, threads, 1, worker, &shared);
}
