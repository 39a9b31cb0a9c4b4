// Heads divided by their root mean square, weighed and gated, in one pass, forwards and backwards:
//
//     n = scale x / sqrt(mean((scale x)²) + eps)
//     y = n weight act(gate)
//
// A job is some heads, one after the other. How many there are in a job does not depend on the number of threads, and
// each has its own sum of the gradient of `weight`.
#include <cmath>
#include <vector>

#include "call.h"
#include "simd.h"
#include "threads.h"

namespace {

enum Opening : int64_t { kNever, kSilu, kSigmoid };

// Mirrored by `Norm` in gated_norm.py. Tensors are (B, T, H, M), `weight` is (M,), and `dweight` (parts, M).
struct Norm {
  int64_t B, T, H, M, opening, parts;
  double eps, scale;
  View x, weight, gate, y, dy, dx, dgate;
  double* dweight;
};

template <class R>
class Rows {
 public:
  explicit Rows(const Norm& call) : call(call), M(call.M) {
    const int64_t size = padded<R>(M), lanes = Simd<R>::lanes;
    room.assign(8 * size + lanes, R(0));
    R* next = room.data();
    next += (lanes - reinterpret_cast<uintptr_t>(next) / sizeof(R) % lanes) % lanes;
    for (R** x : {&weight, &x_, &n, &gate, &open, &dy, &out, &dweight}) *x = next, next += size;
    load_rows(call.weight, 0, 0, 1, 0, 0, M, weight, 0);
    totals.assign(M, 0.0);
  }

  void run(int64_t part, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / (call.T * call.H), t = i / call.H % call.T, h = i % call.H;
      call.dx.data ? backward(b, t, h) : forward(b, t, h);
      if (call.dx.data && (i - first) % kTogether == kTogether - 1) add_up();
    }
    if (!call.dx.data) return;
    add_up();
    std::copy_n(totals.data(), M, call.dweight + part * M);
  }

 private:
  // Terms that are added in the precision of the inputs before they go into a sum of doubles.
  static constexpr int64_t kTogether = 128;

  const Norm& call;
  const int64_t M;
  std::vector<R> room;
  std::vector<double> totals;
  R *weight, *x_, *n, *gate, *open, *dy, *out, *dweight;

  void add_up() {
    for (int64_t m = 0; m < M; ++m) totals[m] += dweight[m], dweight[m] = 0;
  }

  // n and act(gate); returns what x is multiplied by.
  R normalize(int64_t b, int64_t t, int64_t h) {
    load_rows(call.x, b, t, 1, h, 0, M, x_, 0);
    const R scale = R(call.scale);
    R sum = 0;
    for (int64_t m = 0; m < M; ++m) sum += scale * x_[m] * (scale * x_[m]);
    const R factor = scale / std::sqrt(sum / R(M) + R(call.eps));
    for (int64_t m = 0; m < M; ++m) n[m] = factor * x_[m];
    if (call.opening) {
      load_rows(call.gate, b, t, 1, h, 0, M, gate, 0);
      for (int64_t m = 0; m < M; ++m) open[m] = -gate[m];
      exponential(M, open, open);
      for (int64_t m = 0; m < M; ++m) open[m] = R(1) / (R(1) + open[m]);
    }
    return factor;
  }

  void forward(int64_t b, int64_t t, int64_t h) {
    normalize(b, t, h);
    for (int64_t m = 0; m < M; ++m) {
      const R opened = call.opening == kSilu ? gate[m] * open[m] : call.opening == kSigmoid ? open[m] : R(1);
      out[m] = n[m] * weight[m] * opened;
    }
    store_rows(call.y, b, t, 1, h, 0, M, out, 0);
  }

  void backward(int64_t b, int64_t t, int64_t h) {
    const R factor = normalize(b, t, h);
    load_rows(call.dy, b, t, 1, h, 0, M, dy, 0);
    if (call.opening) {
      for (int64_t m = 0; m < M; ++m) {
        const R s = open[m], slope = call.opening == kSilu ? s * (R(1) + gate[m] * (R(1) - s)) : s * (R(1) - s);
        out[m] = dy[m] * n[m] * weight[m] * slope;
        dy[m] *= call.opening == kSilu ? gate[m] * s : s;
      }
      store_rows(call.dgate, b, t, 1, h, 0, M, out, 0);
    }
    R mean = 0;
    for (int64_t m = 0; m < M; ++m) {
      dweight[m] += dy[m] * n[m];
      dy[m] *= weight[m];
      mean += dy[m] * n[m];
    }
    mean /= R(M);
    for (int64_t m = 0; m < M; ++m) out[m] = factor * (dy[m] - n[m] * mean);
    store_rows(call.dx, b, t, 1, h, 0, M, out, 0);
  }
};

template <class R>
void run(const Norm& call) {
  const int64_t rows = call.B * call.T * call.H;
  for_each_job(call.parts, 4 * rows * call.M, [&](int64_t part) {
    Rows<R>(call).run(part, part * rows / call.parts, (part + 1) * rows / call.parts);
  });
}

}  // namespace

extern "C" void fastweights_gated_norm(const Norm* call) {
  call->x.kind == kFloat64 ? run<double>(*call) : run<float>(*call);
}
