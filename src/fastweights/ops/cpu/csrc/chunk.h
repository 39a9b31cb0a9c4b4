// One chunk of one head: a handful of small matrix products, forwards and backwards, with the names and equations of
// ops/chunked.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "call.h"
#include "per_key.h"
#include "simd.h"
#include "triangle.h"
#include "weights.h"

// Some columns of the state of one sequence and head, and the chunks of its time.
struct Job {
  int64_t sequence, batch, head;
  int64_t start, end;       // of time
  int64_t first;            // of its chunks, in `before`
  int64_t column, columns;  // of the state
  int64_t chunks(int64_t C) const { return (end - start + C - 1) / C; }
};

// One chunk of one job, and room for everything that is computed of it.
template <class R>
class Chunk {
 public:
  Chunk(const Call& call, bool backward)
      : call(call), decay(call.a.data), per_key(decay && call.per_key), per_head(decay && !per_key),
        erase(call.e.data), write(call.w.data), D(call.D), C(call.C), Dp(padded<R>(D)), Mp(padded<R>(call.M)),
        Cp((C + kSquare<R> - 1) / kSquare<R> * kSquare<R>) {
    const int64_t states = Dp * Mp, squares = Cp * Cp, keyed = Cp * Dp, valued = Cp * Mp;
    for (int pass = 0; pass < 2; ++pass) {
      size = 0;
      for (R** x : {&q, &k, &k_T}) claim(x, keyed);
      for (R** x : {&v, &rest, &u, &y}) claim(x, valued);
      for (R** x : {&weights.reach, &weights.keys, &weights.products, &weights.system}) claim(x, squares);
      if (per_head) claim(&weights.scores, squares);
      else weights.scores = weights.products;
      for (R** x : {&e, &w, &taken, &dfade, &dkept, &dgate, &read}) claim(x, Cp);
      for (R** x : {&a, &fade}) claim(x, per_key ? keyed : Cp);
      for (R** x : {&last, &exponent, &dlast}) claim(x, Dp);
      if (per_key) for (R** x : {&q_faded, &k_faded}) claim(x, keyed);
      else q_faded = q, k_faded = k;
      claim(&triangle.inverses, Cp * kSquare<R>);
      weights.row = triangle.row = Cp;
      weights.a = a, weights.e = e, weights.fade = fade, triangle.A = weights.system;
      claim(&W, states);
      if (backward) {
        for (R** x : {&dq, &dk, &dread}) claim(x, keyed);
        for (R** x : {&dy, &du, &u_T}) claim(x, valued);
        for (R** x : {&dscores, &dsystem}) claim(x, squares);
        for (R** x : {&dW, &W_T, &dW_T}) claim(x, states);
        if (per_key) claim(&da, keyed);
        if (per_key) claim(&past, C * (C + 1) / 2 * Dp);
      }
      if (pass == 0) {
        arena.reset(static_cast<R*>(std::aligned_alloc(kVectorBytes, size * sizeof(R))));
        if (!arena) return;
        std::memset(arena.get(), 0, size * sizeof(R));
      }
    }
  }

  bool ready() const { return arena != nullptr; }

  // Whether every y, or every gradient of q and k, was finite so far.
  bool finite = true;

  void forward(const Job& job) {
    begin(job);
    load_state(call.W, job.sequence, W);
    for (int64_t c = 0; c < job.chunks(C); ++c) {
      load(c);
      expect(c, c + 1);
      if (call.before) store_state(call.before, job.first + c, W);
      relate();
      solve();
      product(n, M, D, {q_faded, Dp, 1}, W, Mp, {y, Mp, nullptr, 1, nullptr, per_head ? fade : nullptr});
      product(n, M, n, {weights.scores, Cp, 1}, u, Mp, {y, Mp, y}, Part::lower);
      store_rows(call.y, job.batch, time, n, job.head, job.column, M, y, Mp);
      check(M, y, Mp);
      // u is not needed any more, and what a step wrote has faded by Γ[C, t] when the chunk ends.
      if (per_head) scale_rows(u, weights.kept());
      product(D, M, n, per_key ? Operand<R>{k_T, Cp, 1} : Operand<R>{k, 1, Dp}, u, Mp, faded(W));
    }
    store_state(call.W_end, job.sequence, W);
  }

  // Backwards through all chunks; `gradients` says whether to compute more than the gradients of the states.
  void backward(const Job& job, bool gradients) {
    begin(job);
    if (call.dW_end) load_state(call.dW_end, job.sequence, dW);
    else std::fill_n(dW, Dp * Mp, R(0));
    for (int64_t c = job.chunks(C) - 1; c >= 0; --c) {
      reload(c);
      if (gradients) differentiate();
      else store_state(call.after, job.first + c, dW);
      rewind();
    }
    store_state(call.dW_start, job.sequence, dW);
  }

  // The gradients of chunk c, the gradient of the state after it being known.
  void backward_alone(const Job& job, int64_t c) {
    begin(job);
    load_state(call.after, job.first + c, dW);
    reload(c);
    differentiate();
  }

 private:
  const Call& call;
  const bool decay, per_key, per_head, erase, write;
  const int64_t D, C, Dp, Mp, Cp;
  int64_t M = 0, n = 0, time = 0;  // columns of the job, steps of the chunk and the first of them
  const Job* job = nullptr;
  struct Free {
    void operator()(R* x) const { std::free(x); }
  };
  std::unique_ptr<R[], Free> arena;
  int64_t size = 0;
  // With decays per key, k_T ends as Γ[C, s] k_s, and q_faded and k_faded are γ_t q_t and γ_t k_t; otherwise just k and q.
  R *q, *k, *k_T, *q_faded, *k_faded, *v, *u, *y, *rest;
  // fade is γ, last is γ_C and exponent its logarithm; taken is what u takes of k W: e γ, or e.
  R *a, *e, *w, *fade, *last, *exponent, *taken;
  Weights<R> weights;
  Triangle<R> triangle;
  Ahead ahead;
  R *dfade, *dkept, *dlast, *dgate, *read, *da, *past;
  R *W, *dW, *W_T, *dW_T;
  R *dy, *du, *u_T, *dq, *dk, *dread, *dscores, *dsystem;

  void claim(R** x, int64_t count) {
    *x = arena ? arena.get() + size : nullptr;
    size += count;
  }

  void begin(const Job& next) {
    job = &next;
    M = next.columns;
  }

  void load_state(const void* states, int64_t index, R* out) const {
    const R* in = static_cast<const R*>(states) + (index * call.H + job->head) * D * call.M + job->column;
    for (int64_t d = 0; d < D; ++d) {
      std::memcpy(out + d * Mp, in + d * call.M, M * sizeof(R));
      // The padding may hold what NaN times zero left of another sequence.
      std::fill(out + d * Mp + M, out + d * Mp + padded<R>(M), R(0));
    }
  }

  void store_state(void* states, int64_t index, const R* in) const {
    R* out = static_cast<R*>(states) + (index * call.H + job->head) * D * call.M + job->column;
    for (int64_t d = 0; d < D; ++d) std::memcpy(out + d * call.M, in + d * Mp, M * sizeof(R));
  }

  void load(int64_t c) {
    const int64_t b = job->batch, h = job->head;
    time = job->start + c * C;
    n = weights.n = triangle.n = std::min(C, job->end - time);
    load_rows(call.q, b, time, n, h / call.group, 0, D, q, Dp);
    load_rows(call.k, b, time, n, h / call.group, 0, D, k, Dp);
    load_rows(call.v, b, time, n, h, job->column, M, v, Mp);
    if (decay) load_rows(call.a, b, time, n, h, 0, per_key ? D : 1, a, per_key ? Dp : 1);
    if (erase) load_rows(call.e, b, time, n, h, 0, 1, e, 1);
    if (write) load_rows(call.w, b, time, n, h, 0, 1, w, 1);
    if (decay && call.log) open_logarithms();
  }

  void product(int64_t rows, int64_t columns, int64_t inner, const Operand<R>& A, const R* B, int64_t b,
               const Result<R>& C, Part part = Part::all) {
    multiply<R>(rows, columns, inner, A, B, b, C, part, &ahead);
  }

  // Has the products of this chunk ask the memory for a tensor's part in chunk c.
  void expect(const View& x, int64_t c, int64_t head, int64_t from, int64_t size, bool write = false) {
    const int64_t start = job->start + c * C;
    if (c < 0 || start >= job->end || !x.data) return;
    ahead.add(x.at(job->batch, start, head) + from * x.bytes, x.time * x.bytes, std::min(C, job->end - start),
              size * x.bytes, write);
  }

  // What this chunk will write, and what the next one will read.
  void expect(int64_t c, int64_t next) {
    const int64_t h = job->head, keyed = h / call.group;
    ahead.clear();
    expect(call.y, c, h, job->column, M, true);
    for (const View* x : {&call.dq, &call.dk}) expect(*x, c, keyed, 0, D, true);
    expect(call.dv, c, h, 0, M, true);
    for (const View* x : {&call.q, &call.k}) expect(*x, next, keyed, 0, D);
    for (const View* x : {&call.v, &call.dy}) expect(*x, next, h, job->column, M);
  }

  // From logarithms to decays. What fades the state is the exponential of a sum: products of rounded decays next to 1
  // would drift from it, chunk by chunk.
  void open_logarithms() {
    const int64_t width = per_key ? Dp : 1;
    std::fill_n(exponent, Dp, R(0));
    for (int64_t t = 0; t < n; ++t) {
      if (per_key) std::fill(a + t * Dp + D, a + (t + 1) * Dp, R(0));
      for (int64_t d = 0; d < width; ++d) exponent[d] += a[t * width + d];
    }
    exponential(width, exponent, last);
    exponential(n * width, a, a);
  }

  // Row t times factors[t].
  void scale_rows(R* x, const R* factors) const {
    for (int64_t t = 0; t < n; ++t) scale(M, factors[t], x + t * Mp, x + t * Mp);
  }

  // A product that is added to a state of the chunk's start, or to a gradient of its end.
  Result<R> faded(R* x) const { return {x, Mp, x, 1, decay ? last : nullptr, nullptr, !per_key}; }

  // Notes whether all of some rows is finite.
  void check(int64_t columns, const R* x, int64_t stride) {
    constexpr R most = std::numeric_limits<R>::max();
    typename Simd<R>::Ints outside = {};
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < columns; j += Simd<R>::lanes) {
        const auto& now = vector(x + t * stride + j);
        outside |= ~((now <= most) & (now >= -most));
      }
    }
    for (int i = 0; i < Simd<R>::lanes; ++i) finite &= outside[i] == 0;
  }

  // Γ, γ, and how queries and keys of the chunk relate.
  void relate() {
    transpose(n, D, k, Dp, k_T, Cp);
    if (per_key) {
      decayed_products(Sizes{n, D, Dp, Cp}, a, q, k, k_T, weights.reach, weights.products, weights.keys);
      fade_keys();
    } else {
      if (erase) product(n, n, D, {k, Dp, 1}, k_T, Cp, {weights.keys, Cp}, Part::result);
      product(n, n, D, {q, Dp, 1}, k_T, Cp, {weights.products, Cp}, Part::result);
    }
    if (per_head) {
      for (int64_t t = 0; t < n; ++t) fade[t] = t ? a[t] * fade[t - 1] : a[t];
      if (!call.log) last[0] = fade[n - 1];
    }
    if (erase) {
      for (int64_t t = 0; t < n; ++t) taken[t] = per_head ? e[t] * fade[t] : e[t];
      per_head ? weights.template weigh<true, true>() : weights.template weigh<false, true>();
      triangle.invert();
    } else {
      per_head ? weights.template weigh<true, false>() : weights.template weigh<false, false>();
    }
  }

  // γ, γ_t q_t and γ_t k_t with decays per key.
  void fade_keys() {
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = t * Dp;
      if (t) hadamard(D, a + row, fade + row - Dp, fade + row);
      else std::copy_n(a, Dp, fade);
      hadamard(D, fade + row, q + row, q_faded + row);
      hadamard(D, fade + row, k + row, k_faded + row);
    }
    if (!call.log) std::copy_n(fade + (n - 1) * Dp, Dp, last);
  }

  // u, what each step writes: (I + A) u = diag(w) v - diag(e γ) k W.
  void solve() {
    if (erase) {
      product(n, M, D, {k_faded, Dp, 1}, W, Mp, {rest, Mp, v, -1, write ? w : nullptr, taken});
      triangle.solve(M, rest, u, Mp);
    } else {
      for (int64_t t = 0; t < n; ++t) scale(M, write ? w[t] : R(1), v + t * Mp, u + t * Mp);
    }
  }

  // Chunk c as the forward pass had it, and du: the gradient of what each step writes.
  void reload(int64_t c) {
    load(c);
    load_rows(call.dy, job->batch, time, n, job->head, job->column, M, dy, Mp);
    expect(c, c - 1);
    load_state(call.before, job->first + c, W);
    relate();
    solve();
    R* out = erase ? rest : du;
    product(n, M, D, per_key ? Operand<R>{k_T, 1, Cp} : Operand<R>{k, Dp, 1}, dW, Mp,
                {out, Mp, nullptr, 1, nullptr, per_head ? weights.kept() : nullptr});
    product(n, M, n, {weights.scores, 1, Cp}, dy, Mp, {out, Mp, out}, Part::upper);
    if (erase) triangle.solve_transposed(M, rest, du, Mp);
  }

  // dW, from after the chunk to before it. Ruins dy and du.
  void rewind() {
    if (per_head) scale_rows(dy, fade);
    product(D, M, n, {q_faded, 1, Dp}, dy, Mp, faded(dW));
    if (!erase) return;
    scale_rows(du, taken);
    product(D, M, n, {k_faded, 1, Dp}, du, Mp, {dW, Mp, dW, -1});
  }

  void differentiate() {
    const int64_t b = job->batch, h = job->head;
    transpose(n, M, u, Mp, u_T, Cp);
    transpose(D, M, W, Mp, W_T, Dp);
    transpose(D, M, dW, Mp, dW_T, Dp);
    product(n, D, M, {dy, Mp, 1}, W_T, Dp, {dq, Dp});
    product(n, D, M, {u, Mp, 1}, dW_T, Dp, {dk, Dp});
    product(n, n, M, {dy, Mp, 1}, u_T, Cp, {dscores, Cp}, Part::result);
    if (erase) {
      product(n, D, M, {du, Mp, 1}, W_T, Dp, {dread, Dp});
      product(n, n, M, {du, Mp, 1}, u_T, Cp, {dsystem, Cp}, Part::result);
      for (int64_t t = 0; t < n; ++t) read[t] = dot(D, dread + t * Dp, k_faded + t * Dp);
    }
    if (per_head) {
      for (int64_t t = 0; t < n; ++t) {
        dfade[t] = dot(D, dq + t * Dp, q + t * Dp) - (erase ? e[t] * read[t] : R(0));
        dkept[t] = dot(D, dk + t * Dp, k + t * Dp);
        scale(D, fade[t], dq + t * Dp, dq + t * Dp);
        scale(D, weights.kept()[t], dk + t * Dp, dk + t * Dp);
      }
    }
    if (erase) {
      per_head ? unweigh<true, true>() : unweigh<false, true>();
      store_gate(call.de, dgate);
    } else {
      per_head ? unweigh<true, false>() : unweigh<false, false>();
    }
    if (per_head) differentiate_decay();
    if (per_key) {
      differentiate_per_key();
    } else {
      product(n, D, n, {dscores, Cp, 1}, k, Dp, {dq, Dp, dq}, Part::lower);
      product(n, D, n, {dscores, 1, Cp}, q, Dp, {dk, Dp, dk}, Part::upper);
      if (erase) {
        for (int64_t t = 0; t < n; ++t) add_scaled(D, -taken[t], dread + t * Dp, dk + t * Dp);
        product(n, D, n, {dsystem, Cp, 1}, k, Dp, {dk, Dp, dk, -1}, Part::lower);
        product(n, D, n, {dsystem, 1, Cp}, k, Dp, {dk, Dp, dk, -1}, Part::upper);
      }
    }
    // Those of q and k: the sum over the heads of a group, which come one after the other.
    const bool add = h % call.group;
    store_rows(call.dq, b, time, n, h / call.group, 0, D, dq, Dp, add);
    store_rows(call.dk, b, time, n, h / call.group, 0, D, dk, Dp, add);
    check(D, dq, Dp);
    check(D, dk, Dp);
    if (write) {
      for (int64_t t = 0; t < n; ++t) {
        dgate[t] = dot(M, du + t * Mp, v + t * Mp);
        scale(M, w[t], du + t * Mp, rest + t * Mp);
      }
      store_gate(call.dw, dgate);
    }
    store_rows(call.dv, b, time, n, h, 0, M, write ? rest : du, Mp);
  }

  template <bool Fades, bool Erases>
  void unweigh() {
    weights.template unweigh<Fades, Erases>(dscores, dsystem, read, dgate);
  }

  void differentiate_decay() {
    typename Simd<R>::Vector sums = {};
    for (int64_t d = 0; d < D; ++d) {
      for (int64_t j = 0; j < M; j += Simd<R>::lanes) sums += vector(dW + d * Mp + j) * vector(W + d * Mp + j);
    }
    dfade[n - 1] += sum_of<R>(sums);
    weights.differentiate(dkept, dfade, dgate);
    if (call.log) hadamard(n, a, dgate, dgate);
    store_gate(call.da, dgate);
  }

  void differentiate_per_key() {
    for (int64_t d = 0; d < D; ++d) dlast[d] = dot(M, dW + d * Mp, W + d * Mp);
    decayed_gradients(Sizes{n, D, Dp, Cp}, a, q, k, erase ? e : nullptr, fade, dlast, dscores, dsystem, dread, past, dq, dk,
                      da);
    if (call.log) for (int64_t t = 0; t < n; ++t) hadamard(D, a + t * Dp, da + t * Dp, da + t * Dp);
    store_rows(call.da, job->batch, time, n, job->head, 0, D, da, Dp);
  }

  void store_gate(const View& x, const R* values) const {
    store_rows(x, job->batch, time, n, job->head, 0, 1, values, 1);
  }
};
