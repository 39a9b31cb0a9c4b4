// The family's recurrence token by token, for one token or a few of each sequence, without gradients:
//
//     q, k = phi(q), phi(k)
//     W, z = a W, a z
//     u = w v - e W k / (z · k)        divided only with attention normalisation
//     W, z = W + u k^T, z + k          w k for a rule that only adds
//     y = W q / (z · q)
//
// Next to the state everything is small. It is read for W k, and read again and written for the rest, which finds it in
// the first or second cache: memory sees it once. A job is one head of one sequence.
#include <cmath>
#include <vector>

#include "call.h"
#include "layers/maps.h"
#include "simd.h"
#include "threads.h"

namespace {

// What is given for a coefficient: nothing; itself, one minus it, its logit, the logit of one minus it, or its logarithm.
enum Form : int32_t { kAbsent, kPlain, kComplement, kLogit, kComplementLogit, kLogarithm };

// Mirrored by `StepPlan` in step.py, and the same for all calls of a spec. Heads of q and k are of size R before the map
// and of size D after it. The views have no data.
struct StepPlan {
  int64_t N, T, H, group, R, D, M, nu;
  double scale;
  int32_t map, norm, wide, per_key, normalized;
  int32_t form_a, form_e, form_w;
  View q, k, v, a, e, w, y;
};

// The tensors of one call, packed by step.py: heads, gates, states before and after, and bounds and starts of sequences.
struct Tensors {
  char *q, *k, *v, *a, *e, *w;
  const void *W, *z;
  char* y;
  void *W_end, *z_end;
  const int64_t* bounds;
  const bool* starts;
};

// As `vector` of simd.h, anywhere in memory.
template <class R>
struct Unaligned {
  typedef R Vector __attribute__((vector_size(kVectorBytes), aligned(sizeof(R)), may_alias));
};

template <class R>
const typename Unaligned<R>::Vector& anywhere(const R* x) {
  return *reinterpret_cast<const typename Unaligned<R>::Vector*>(x);
}

template <class R>
typename Unaligned<R>::Vector& anywhere(R* x) {
  return *reinterpret_cast<typename Unaligned<R>::Vector*>(x);
}

// out += k W for `Rows` rows of W.
template <class R, int Rows>
void recall_rows(int64_t M, const R* W, const R* k, R* out) {
  using V = typename Simd<R>::Vector;
  int64_t m = 0;
  for (; m + Simd<R>::lanes <= M; m += Simd<R>::lanes) {
    V sums[2] = {anywhere(out + m), V{}};
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) sums[i % 2] += k[i] * anywhere(W + i * M + m);
    anywhere(out + m) = sums[0] + sums[1];
  }
  for (; m < M; ++m) {
    for (int i = 0; i < Rows; ++i) out[m] += k[i] * W[i * M + m];
  }
}

// W = fade from + k u^T and y += q W for `Rows` rows of W.
template <class R, int Rows>
void update_rows(int64_t M, const R* from, R* W, const R* fade, const R* k, const R* u, const R* q, R* y) {
  using V = typename Simd<R>::Vector;
  int64_t m = 0;
  for (; m + Simd<R>::lanes <= M; m += Simd<R>::lanes) {
    const V written = anywhere(u + m);
    V sums[2] = {anywhere(y + m), V{}};
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const V now = fade[i] * anywhere(from + i * M + m) + k[i] * written;
      anywhere(W + i * M + m) = now;
      sums[i % 2] += q[i] * now;
    }
    anywhere(y + m) = sums[0] + sums[1];
  }
  for (; m < M; ++m) {
    for (int i = 0; i < Rows; ++i) {
      W[i * M + m] = fade[i] * from[i * M + m] + k[i] * u[m];
      y[m] += q[i] * W[i * M + m];
    }
  }
}

template <class R>
class Head {
 public:
  Head(const StepPlan& plan, const Tensors& given) : plan(plan), given(given), D(plan.D), M(plan.M) {
    thread_local std::vector<R> kept;
    const int64_t Dp = padded<R>(D), Rp = padded<R>(4 * plan.R), lanes = Simd<R>::lanes;
    kept.assign(4 * Dp + 3 * padded<R>(M) + 2 * Rp + lanes, R(0));
    R* room = kept.data();
    // Up to a vector boundary.
    room += (lanes - reinterpret_cast<uintptr_t>(room) / sizeof(R) % lanes) % lanes;
    for (R** x : {&q, &k, &fade, &faded}) *x = room, room += Dp;
    for (R** x : {&u, &y, &recall}) *x = room, room += padded<R>(M);
    for (R** x : {&raw, &scratch}) *x = room, room += Rp;
  }

  void run(int64_t n, int64_t h) {
    const int64_t memory = n * plan.H + h, batch = given.bounds ? 0 : n;
    const int64_t start = given.bounds ? given.bounds[n] : 0, end = given.bounds ? given.bounds[n + 1] : plan.T;
    W = static_cast<R*>(given.W_end) + memory * D * M;
    before = given.W ? static_cast<const R*>(given.W) + memory * D * M : nullptr;
    z = plan.normalized ? static_cast<R*>(given.z_end) + memory * D : nullptr;
    if (z && given.z && given.z != given.z_end) std::copy_n(static_cast<const R*>(given.z) + memory * D, D, z);
    if (!before) clear();
    else if (start == end && before != W) std::copy_n(before, D * M, W);
    if (z && !given.z) std::fill_n(z, D, R(0));
    for (int64_t t = start; t < end; ++t) {
      if (given.starts && given.starts[batch * plan.T + t]) {
        clear();
        if (z) std::fill_n(z, D, R(0));
      }
      step(batch, t, h);
    }
  }

 private:
  const StepPlan& plan;
  const Tensors& given;
  const int64_t D, M;
  R *q, *k, *fade, *faded, *u, *y, *recall, *raw, *scratch;
  const R* before;  // the state before a token, which may stand elsewhere than the one after it
  R *W, *z;

  void clear() {
    std::fill_n(W, D * M, R(0));
    before = W;
  }

  static void load(View x, char* data, int64_t b, int64_t t, int64_t h, int64_t size, R* out) {
    x.data = data;
    load_rows(x, b, t, 1, h, 0, size, out, 0);
  }

  void step(int64_t b, int64_t t, int64_t h) {
    features(plan.q, given.q, b, t, h / plan.group, q);
    features(plan.k, given.k, b, t, h / plan.group, k);
    if (plan.scale != 1) {
      for (int64_t d = 0; d < D; ++d) q[d] *= R(plan.scale);
    }
    decay(b, t, h);
    load(plan.v, given.v, b, t, h, M, u);
    const bool erases = plan.form_e;
    const R write = coefficient(plan.form_w, plan.w, given.w, b, t, h);
    if (plan.form_w) {
      for (int64_t m = 0; m < M; ++m) u[m] *= write;
    }
    if (erases) {
      const R erase = coefficient(plan.form_e, plan.e, given.e, b, t, h);
      for (int64_t d = 0; d < D; ++d) faded[d] = fade[d] * k[d];
      std::fill_n(recall, M, R(0));
      int64_t d = 0;
      for (; d + kTileRows <= D; d += kTileRows) recall_rows<R, kTileRows>(M, before + d * M, faded + d, recall);
      for (; d < D; ++d) recall_rows<R, 1>(M, before + d * M, faded + d, recall);
      if (z) {
        const R by = product(z, k);
        for (int64_t m = 0; m < M; ++m) recall[m] = quotient(recall[m], by);
      }
      for (int64_t m = 0; m < M; ++m) u[m] -= erase * recall[m];
    }
    std::fill_n(y, M, R(0));
    int64_t d = 0;
    for (; d + kTileRows <= D; d += kTileRows) {
      update_rows<R, kTileRows>(M, before + d * M, W + d * M, fade + d, k + d, u, q + d, y);
    }
    for (; d < D; ++d) update_rows<R, 1>(M, before + d * M, W + d * M, fade + d, k + d, u, q + d, y);
    if (z) {
      const R counted = plan.form_w && !erases ? write : R(1);
      for (int64_t i = 0; i < D; ++i) z[i] += counted * k[i];
      const R by = product(z, q);
      for (int64_t m = 0; m < M; ++m) y[m] = quotient(y[m], by);
    }
    View out = plan.y;
    out.data = given.y;
    store_rows(out, b, t, 1, h, 0, M, y, 0);
    before = W;
  }

  R product(const R* x, const R* other) const {
    R sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += x[d] * other[d];
    return sum;
  }

  void decay(int64_t b, int64_t t, int64_t h) {
    if (!plan.form_a) {
      std::fill_n(fade, D, R(1));
      return;
    }
    bool empties = true;
    if (plan.per_key) {
      load(plan.a, given.a, b, t, h, D, fade);
      open(plan.form_a, D, fade);
      for (int64_t d = 0; d < D; ++d) empties &= fade[d] == 0;
    } else {
      const R a = coefficient(plan.form_a, plan.a, given.a, b, t, h);
      std::fill_n(fade, D, a);
      empties = a == 0;
    }
    // Whatever stood in a memory that fades to nothing: 0 times what is not a number would be no number.
    if (empties) clear();
    if (!z) return;
    for (int64_t d = 0; d < D; ++d) z[d] = empties ? R(0) : fade[d] * z[d];
  }

  R coefficient(int32_t form, const View& x, char* data, int64_t b, int64_t t, int64_t h) const {
    if (form == kAbsent) return R(1);
    alignas(kVectorBytes) R value[Simd<R>::lanes] = {};
    load(x, data, b, t, h, 1, value);
    open(form, 1, value);
    return value[0];
  }

  // From what is given to the coefficient. Goes over whole vectors.
  static void open(int32_t form, int64_t size, R* x) {
    if (form == kPlain) return;
    if (form == kComplement) {
      for (int64_t i = 0; i < size; ++i) x[i] = R(1) - x[i];
    } else if (form == kLogarithm) {
      exponential(size, x, x);
    } else {
      if (form == kLogit) scale(size, R(-1), x, x);
      exponential(size, x, x);
      for (int64_t i = 0; i < size; ++i) x[i] = R(1) / (R(1) + x[i]);
    }
  }

  void features(const View& x, char* data, int64_t b, int64_t t, int64_t h, R* phi) {
    const int64_t size = plan.R;
    load(x, data, b, t, h, size, raw);
    if (plan.map == kDpfp) map_dpfp(plan.nu, size, raw, phi, scratch);
    else map_each(Map(plan.map), padded<R>(size), raw, phi, scratch);
    normalize(Norm(plan.norm), D, phi);
  }
};

template <class R>
void run(const StepPlan& plan, const Tensors& given) {
  const int64_t heads = plan.N * plan.H;
  for_each_job(heads, heads * plan.D * plan.M * (given.bounds ? 1 : plan.T),
               [&](int64_t i) { Head<R>(plan, given).run(i / plan.H, i % plan.H); });
}

}  // namespace

extern "C" void fastweights_step(const StepPlan* plan, const Tensors* given) {
  plan->wide ? run<double>(*plan, *given) : run<float>(*plan, *given);
}
