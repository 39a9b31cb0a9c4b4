// PyTorch's threads, by two functions of its stable C interface. build.py hands them over when it loads the library,
// which therefore needs nothing of PyTorch to be built, and runs with every version that has them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

// Calls `work` for parts of [begin, end) on PyTorch's threads; returns 0 if all went well.
int32_t parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc work, void* context);

// As many as PyTorch uses.
int64_t number_of_threads();

// Pieces of work 0, 1, ... for several threads. Each thread begins with pieces that are its own in every call of that
// size, so that it finds in its cache what it wrote before; once they are done it takes from the others.
class Shares {
 public:
  Shares(int64_t threads, int64_t count) : threads_(threads), shares_(new Share[threads]) {
    for (int64_t t = 0; t < threads; ++t) {
      shares_[t].next = t * count / threads;
      shares_[t].end = (t + 1) * count / threads;
    }
  }

  // The next piece for a thread, or -1 where none are left; `seen` counts the threads of which it took all, itself
  // first, and starts at 0.
  int64_t next(int64_t thread, int64_t& seen) {
    for (; seen < threads_; ++seen) {
      Share& share = shares_[(thread + seen) % threads_];
      const int64_t i = share.next++;
      if (i < share.end) return i;
    }
    return -1;
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads_;
  const std::unique_ptr<Share[]> shares_;
};

// Calls work(i) for all i < count, on several threads where `size`, the numbers to read and write, is worth that.
template <class Work>
void for_each_job(int64_t count, int64_t size, const Work& work) {
  constexpr int64_t kWorthAThread = 1 << 15;
  const int64_t most = std::min(count, size / kWorthAThread);
  const int64_t threads = most < 2 ? 1 : std::min(most, number_of_threads());
  struct Shared {
    const Work& work;
    Shares shares;
  } shared{work, Shares(threads, count)};
  // Volatile, so that there is one copy of the work: a second one, for one thread, may round in another order.
  ParallelFunc volatile worker = [](int64_t thread, int64_t, void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    for (int64_t seen = 0, i; (i = shared.shares.next(thread, seen)) >= 0;) shared.work(i);
  };
  if (threads < 2) worker(0, 1, &shared);
  else parallel_for(0, threads, 1, worker, &shared);
}
