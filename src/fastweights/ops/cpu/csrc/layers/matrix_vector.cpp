// out = W x + b for one vector: the logits of one token. W is read once, in order, which is all the time it takes.
#include <cstring>
#include <vector>

#include "call.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kRowsOfJob = 512, kTogether = 8;

template <class R>
R sum_of(typename Simd<R>::Vector x) {
  R sum = 0;
  for (int i = 0; i < Simd<R>::lanes; ++i) sum += x[i];
  return sum;
}

// x · row for `Rows` rows of whole vectors, wherever they begin.
template <class R, int Rows>
void multiply_rows(int64_t size, const R* rows, int64_t stride, const R* x, R* out) {
  using V = typename Simd<R>::Vector;
  V sums[Rows] = {};
  int64_t j = 0;
  for (; j + Simd<R>::lanes <= size; j += Simd<R>::lanes) {
    const V right = vector(x + j);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      V left;
      std::memcpy(&left, rows + i * stride + j, sizeof(V));
      sums[i] += left * right;
    }
  }
  for (int i = 0; i < Rows; ++i) {
    out[i] = sum_of<R>(sums[i]);
    for (int64_t rest = j; rest < size; ++rest) out[i] += rows[i * stride + rest] * x[rest];
  }
}

template <class R>
void run(int64_t rows, int64_t size, const View& W, const View& x, const View& b, R* out) {
  std::vector<R> room(padded<R>(size) + Simd<R>::lanes);
  R* vector_x = room.data();
  vector_x += (Simd<R>::lanes - reinterpret_cast<uintptr_t>(vector_x) / sizeof(R) % Simd<R>::lanes) % Simd<R>::lanes;
  load_rows(x, 0, 0, 1, 0, 0, size, vector_x, 0);
  const bool as_is = W.kind == (sizeof(R) == 4 ? kFloat32 : kFloat64);
  for_each_job((rows + kRowsOfJob - 1) / kRowsOfJob, rows * size, [&](int64_t job) {
    thread_local std::vector<R> converted;
    if (!as_is) converted.resize(kTogether * size);
    const int64_t end = std::min(rows, (job + 1) * kRowsOfJob);
    for (int64_t r = job * kRowsOfJob, count; r < end; r += count) {
      count = std::min(kTogether, end - r);
      const R* from = reinterpret_cast<const R*>(W.at(r, 0, 0));
      int64_t stride = W.batch;
      if (!as_is) {
        for (int64_t i = 0; i < count; ++i) load_rows(W, r + i, 0, 1, 0, 0, size, converted.data() + i * size, 0);
        from = converted.data(), stride = size;
      }
      if (count == kTogether) {
        multiply_rows<R, kTogether>(size, from, stride, vector_x, out + r);
      } else {
        for (int64_t i = 0; i < count; ++i) multiply_rows<R, 1>(size, from + i * stride, stride, vector_x, out + r + i);
      }
      R bias[kTogether];
      load_rows(b, 0, 0, 1, 0, r, count, bias, 0);
      for (int64_t i = 0; i < count; ++i) out[r + i] += bias[i];
    }
  });
}

}  // namespace

// `views` are those of W (rows, size), x (size,) and b (rows,).
extern "C" void fastweights_matrix_vector(int64_t rows, int64_t size, int wide, const View* views, void* out) {
  wide ? run(rows, size, views[0], views[1], views[2], static_cast<double*>(out))
       : run(rows, size, views[0], views[1], views[2], static_cast<float*>(out));
}
