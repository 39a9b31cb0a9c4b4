// Logits become probabilities where they stand, and the loss of each row's target comes with them: a row is read from
// memory once and written once.
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsOfJob = 8, kChunk = 1024;

// Mirrored by `Softmax` in softmax.py. `logits` are (rows, size), `targets` and `nll` (rows,), all contiguous.
struct Softmax {
  int64_t rows, size, wide;
  void* logits;
  const int64_t* targets;
  void* nll;
};

template <class R>
R largest_of(int64_t size, const R* x) {
  using V = typename Simd<R>::Vector;
  constexpr int64_t L = Simd<R>::lanes;
  V found = V{} - std::numeric_limits<R>::infinity();
  int64_t i = 0;
  for (V next; i + L <= size; i += L) {
    std::memcpy(&next, x + i, sizeof(V));
    found = next > found ? next : found;
  }
  R largest = found[0];
  for (int64_t j = 1; j < L; ++j) largest = found[j] > largest ? found[j] : largest;
  for (; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

template <class R>
void run(const Softmax& call) {
  const int64_t rows = call.rows, size = call.size;
  for_each_job((rows + kRowsOfJob - 1) / kRowsOfJob, rows * size, [&](int64_t job) {
    alignas(kVectorBytes) R chunk[kChunk] = {};
    for (int64_t r = job * kRowsOfJob; r < std::min(rows, (job + 1) * kRowsOfJob); ++r) {
      R* x = static_cast<R*>(call.logits) + r * size;
      const R largest = largest_of(size, x), target = x[call.targets[r]];
      R sum = 0;
      for (int64_t from = 0; from < size; from += kChunk) {
        const int64_t count = std::min(kChunk, size - from);
        for (int64_t i = 0; i < count; ++i) chunk[i] = x[from + i] - largest;
        exponential(count, chunk, chunk);
        for (int64_t i = 0; i < count; ++i) sum += x[from + i] = chunk[i];
      }
      const R inverse = R(1) / sum;
      for (int64_t i = 0; i < size; ++i) x[i] *= inverse;
      static_cast<R*>(call.nll)[r] = std::log(sum) + largest - target;
    }
  });
}

}  // namespace

extern "C" void fastweights_softmax(const Softmax* call) { call->wide ? run<double>(*call) : run<float>(*call); }
