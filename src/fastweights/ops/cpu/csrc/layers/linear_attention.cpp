// Linear attention without a direction of time, forwards and backwards, with feature map, padding and division inside.
//
//     W = phi(k)^T v,  z = sum of phi(k),  y = phi(q) W / (phi(q) · z)
//
// or, where that takes fewer products, by the weights A = phi(q) phi(k)^T:
//
//     y = A v / (sums of the rows of A)
//
// A job is one head of one sequence, from its raw heads to y, so that nothing in between goes through memory: it maps
// some tokens, multiplies them, and takes the next. All is computed in at least float32. With g = dy / (phi(q) · z) and
// c = -(g · y) the gradients are
//
//     dphi(q) = g W^T + c z^T,  dW = phi(q)^T g,  dz = phi(q)^T c,  dphi(k) = v dW^T + dz,  dv = phi(k) dW
//
// A state that is written once and read many times goes in and out by itself.
#include "threads.h"
#include "tokens.h"

namespace {

// Numbers of the features of the tokens that are worked on at once.
constexpr int64_t kRoom = 8192, kMostTokens = 128;

// Mirrored by `Attention` in linear_attention.py. q is (B, T, H, r), k (B, S, H, r), v (B, S, H, M), `mask` (B, S) is
// false for padding. W (B, H, D, M) and z (B, H, D) are written where there are no queries, and read where there are no
// keys. In the backward pass `dq` is there. `weights` says which of the two orders of products is taken.
struct Attention {
  Mapping mapping;
  int64_t wide, B, T, S, H, M, normalized, weights;
  const bool* mask;
  void *W, *z;
  View q, k, v, y, dy, dq, dk, dv;
};

template <class R>
class Head {
 public:
  // Numbers that a job needs.
  static int64_t size(const Attention& call, const Features<R>& to) {
    const int64_t Dp = to.Dp, Mp = padded<R>(call.M);
    const int64_t T = padded<R>(tokens_of(call, call.T)), S = padded<R>(tokens_of(call, call.S));
    const int64_t between = call.weights ? (Dp + Mp) * S + 2 * T * S : 4 * Dp * Mp + 2 * Dp;
    const int64_t tokens = 2 * (T + S) * Mp + 2 * T + std::max(T, S) * Dp;
    return Tokens<R>::size(to, T) + Tokens<R>::size(to, S) + tokens + between;
  }

  Head(const Attention& call, const Features<R>& to, int64_t b, int64_t h)
      : call(call), D(call.mapping.D), M(call.M), Dp(to.Dp), Mp(padded<R>(M)), b(b), h(h),
        most_q(padded<R>(tokens_of(call, call.T))), most_k(padded<R>(tokens_of(call, call.S))), room(size(call, to)),
        queries(to, true, most_q, room), keys(to, false, most_k, room) {
    y = room.take(most_q * Mp), g = room.take(most_q * Mp), c = room.take(most_q), den = room.take(most_q);
    v = room.take(most_k * Mp), dv = room.take(most_k * Mp);
    dphi = room.take(std::max(most_q, most_k) * Dp);
  }

  void run() {
    if (call.weights) return call.dq.data ? backward_by_weights() : forward_by_weights();
    W = room.take(Dp * Mp), z = room.take(D);
    if (call.dq.data) return backward();
    call.k.data ? write() : load_state();
    if (call.q.data) read();
  }

 private:
  const Attention& call;
  const int64_t D, M, Dp, Mp, b, h;
  const int64_t most_q, most_k;
  Room<R> room;
  Tokens<R> queries, keys;
  R *y, *g, *c, *den, *v, *dv, *dphi, *W, *z;

  // Of T tokens, how many are worked on at once. There is room for a whole number of vectors of them, as transposing
  // takes.
  static int64_t tokens_of(const Attention& call, int64_t T) {
    if (call.weights) return T;
    const int64_t room = kRoom / std::max(padded<R>(call.mapping.D), padded<R>(call.M));
    return std::min(T, std::max<int64_t>(Simd<R>::lanes, std::min(room, kMostTokens)));
  }

  R* state(void* states) const { return static_cast<R*>(states) + (b * call.H + h) * D * M; }
  R* sums(void* states) const { return static_cast<R*>(states) + (b * call.H + h) * D; }

  void load_state() {
    std::fill_n(z, Dp, R(0));
    if (call.normalized) std::copy_n(sums(call.z), D, z);
    if (M == Mp && reinterpret_cast<uintptr_t>(state(call.W)) % kVectorBytes == 0) {
      W = state(call.W);
      return;
    }
    for (int64_t d = 0; d < Dp; ++d) {
      std::fill_n(W + d * Mp, Mp, R(0));
      if (d < D) std::copy_n(state(call.W) + d * M, M, W + d * Mp);
    }
  }

  // Keys and values from s on; nothing where there is padding.
  void load_keys(int64_t s, int64_t count, bool slopes) {
    keys.load(call.k, b, s, count, h, slopes);
    for (int64_t i = 0; i < count; ++i) {
      R* row = v + i * Mp;
      load_rows(call.v, b, s + i, 1, h, 0, M, row, 0);
      std::fill_n(row + M, Mp - M, R(0));
      if (seen(s + i)) continue;
      std::fill_n(row, M, R(0));
      std::fill_n(keys.phi + i * Dp, Dp, R(0));
    }
  }

  bool seen(int64_t s) const { return !call.mask || call.mask[b * call.S + s]; }

  void store_key_gradients(int64_t s, int64_t count) {
    if (call.mask) {
      for (int64_t i = 0; i < count; ++i) {
        if (!seen(s + i)) std::fill_n(dv + i * Mp, M, R(0));
      }
    }
    store_rows(call.dv, b, s, count, h, 0, M, dv, Mp);
    keys.store_gradient(dphi, call.dk, b, s, count, h);
    if (!call.mask) return;
    std::fill_n(dphi, padded<R>(call.mapping.r), R(0));
    for (int64_t i = 0; i < count; ++i) {
      if (!seen(s + i)) store_rows(call.dk, b, s + i, 1, h, 0, call.mapping.r, dphi, 0);
    }
  }

  void write() {
    std::fill_n(W, Dp * Mp, R(0));
    std::fill_n(z, Dp, R(0));
    for (int64_t s = 0; s < call.S; s += most_k) {
      const int64_t count = std::min(most_k, call.S - s);
      load_keys(s, count, false);
      multiply(D, M, count, Operand<R>{keys.phi, 1, Dp}, v, Mp, Result<R>{W, Mp, W});
      for (int64_t i = 0; i < count; ++i) add(keys.phi + i * Dp, z);
    }
    if (!call.W) return;
    for (int64_t d = 0; d < D; ++d) std::copy_n(W + d * Mp, M, state(call.W) + d * M);
    if (call.normalized) std::copy_n(z, D, sums(call.z));
  }

  void read() {
    for (int64_t t = 0; t < call.T; t += most_q) {
      const int64_t count = std::min(most_q, call.T - t);
      queries.load(call.q, b, t, count, h, false);
      recall(count);
      store_rows(call.y, b, t, count, h, 0, M, y, Mp);
    }
  }

  // y and what it was divided by, for the queries that were loaded.
  void recall(int64_t count) {
    multiply(count, M, D, Operand<R>{queries.phi, Dp, 1}, W, Mp, Result<R>{y, Mp});
    for (int64_t i = 0; i < count; ++i) den[i] = product(Dp, queries.phi + i * Dp, z);
    divide(count);
  }

  void divide(int64_t count) {
    if (!call.normalized) return;
    for (int64_t i = 0; i < count; ++i) {
      const R factor = quotient(R(1), den[i]);
      R* row = y + i * Mp;
      if (factor == 0) std::fill_n(row, Mp, R(0));
      else for (int64_t m = 0; m < Mp; ++m) row[m] *= factor;
    }
  }

  // g and c for dy from t on, with the y that was computed last.
  void load_gradient(int64_t t, int64_t count) {
    load_rows(call.dy, b, t, count, h, 0, M, g, Mp);
    for (int64_t i = 0; i < count; ++i) {
      R* row = g + i * Mp;
      std::fill_n(row + M, Mp - M, R(0));
      c[i] = 0;
      if (!call.normalized) continue;
      const R factor = quotient(R(1), den[i]);
      if (factor == 0) std::fill_n(row, M, R(0));
      else for (int64_t m = 0; m < M; ++m) row[m] *= factor;
      c[i] = -product(Mp, row, y + i * Mp);
    }
  }

  void backward() {
    write();
    R *Wt = room.take(Mp * Dp), *dW = room.take(Dp * Mp), *dWt = room.take(Mp * Dp), *dz = room.take(D);
    transpose(D, M, W, Mp, Wt, Dp);
    std::fill_n(dW, Dp * Mp, R(0));
    std::fill_n(dz, Dp, R(0));
    for (int64_t t = 0; t < call.T; t += most_q) {
      const int64_t count = std::min(most_q, call.T - t);
      queries.load(call.q, b, t, count, h, true);
      recall(count);
      load_gradient(t, count);
      multiply(D, M, count, Operand<R>{queries.phi, 1, Dp}, g, Mp, Result<R>{dW, Mp, dW});
      multiply(count, D, M, Operand<R>{g, Mp, 1}, Wt, Dp, Result<R>{dphi, Dp});
      for (int64_t i = 0; i < count && call.normalized; ++i) {
        for (int64_t d = 0; d < Dp; ++d) dphi[i * Dp + d] += c[i] * z[d], dz[d] += c[i] * queries.phi[i * Dp + d];
      }
      queries.store_gradient(dphi, call.dq, b, t, count, h);
    }
    transpose(D, M, dW, Mp, dWt, Dp);
    for (int64_t s = 0; s < call.S; s += most_k) {
      const int64_t count = std::min(most_k, call.S - s);
      load_keys(s, count, true);
      multiply(count, D, M, Operand<R>{v, Mp, 1}, dWt, Dp, Result<R>{dphi, Dp});
      for (int64_t i = 0; i < count && call.normalized; ++i) add(dz, dphi + i * Dp);
      multiply(count, M, D, Operand<R>{keys.phi, Dp, 1}, dW, Mp, Result<R>{dv, Mp});
      store_key_gradients(s, count);
    }
  }

  // A = phi(q) phi(k)^T, its sums, and y.
  R* weigh(bool slopes) {
    const int64_t T = call.T, S = call.S, Sp = padded<R>(S);
    load_keys(0, S, slopes);
    std::fill_n(keys.phi + S * Dp, (Sp - S) * Dp, R(0));
    queries.load(call.q, b, 0, T, h, slopes);
    R *Kt = room.take(Dp * Sp), *A = room.take(T * Sp);
    transpose(S, D, keys.phi, Dp, Kt, Sp);
    multiply(T, S, D, Operand<R>{queries.phi, Dp, 1}, Kt, Sp, Result<R>{A, Sp});
    multiply(T, M, S, Operand<R>{A, Sp, 1}, v, Mp, Result<R>{y, Mp});
    for (int64_t i = 0; i < T; ++i) {
      den[i] = 0;
      for (int64_t s = 0; s < Sp; ++s) den[i] += A[i * Sp + s];
    }
    divide(T);
    return A;
  }

  void forward_by_weights() {
    weigh(false);
    store_rows(call.y, b, 0, call.T, h, 0, M, y, Mp);
  }

  void backward_by_weights() {
    const int64_t T = call.T, S = call.S, Sp = padded<R>(S);
    const R* A = weigh(true);
    load_gradient(0, T);
    multiply(S, M, T, Operand<R>{A, 1, Sp}, g, Mp, Result<R>{dv, Mp});
    R *Vt = room.take(Mp * Sp), *dA = room.take(T * Sp);
    std::fill_n(v + S * Mp, (Sp - S) * Mp, R(0));
    transpose(S, M, v, Mp, Vt, Sp);
    multiply(T, S, M, Operand<R>{g, Mp, 1}, Vt, Sp, Result<R>{dA, Sp});
    for (int64_t i = 0; i < T && call.normalized; ++i) {
      for (int64_t s = 0; s < Sp; ++s) dA[i * Sp + s] += c[i];
    }
    multiply(S, D, T, Operand<R>{dA, 1, Sp}, queries.phi, Dp, Result<R>{dphi, Dp});
    store_key_gradients(0, S);
    multiply(T, D, S, Operand<R>{dA, Sp, 1}, keys.phi, Dp, Result<R>{dphi, Dp});
    queries.store_gradient(dphi, call.dq, b, 0, T, h);
  }

  static R product(int64_t size, const R* x, const R* other) {
    R sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += x[i] * other[i];
    return sum;
  }

  // y += x, a row of features.
  void add(const R* x, R* to) const {
    for (int64_t d = 0; d < Dp; ++d) to[d] += x[d];
  }
};

template <class R>
void run(const Attention& call) {
  const Features<R> to(call.mapping);
  const int64_t tokens = call.B * (call.T + call.S) * call.H;
  for_each_job(call.B * call.H, tokens * (call.mapping.r + call.M), [&](int64_t i) {
    Head<R>(call, to, i / call.H, i % call.H).run();
  });
}

}  // namespace

extern "C" void fastweights_linear_attention(const Attention* call) {
  call->wide ? run<double>(*call) : run<float>(*call);
}
