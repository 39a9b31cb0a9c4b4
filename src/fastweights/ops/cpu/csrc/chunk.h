// One chunk of one head: a handful of small matrix products, forwards and backwards, with the names and equations of
// ops/chunked.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "call.h"
#include "per_key.h"
#include "simd.h"

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
      : call(call), decay(call.a.data), per_key(decay && call.per_key), per_head(decay && !per_key), erase(call.e.data), write(call.w.data), D(call.D), C(call.C),
        Dp(padded<R>(D)), Mp(padded<R>(call.M)), Cp(padded<R>(C)) {
    const int64_t states = Dp * Mp, squares = Cp * Cp, keyed = Cp * Dp, valued = Cp * Mp;
    for (int pass = 0; pass < 2; ++pass) {
      size = 0;
      for (R** x : {&q, &k, &k_T}) claim(x, keyed);
      for (R** x : {&v, &u, &y}) claim(x, valued);
      claim(&scratch, std::max(valued, Cp));
      for (R** x : {&reach, &keys, &products, &system}) claim(x, squares);
      if (per_head) claim(&scores, squares);
      else scores = products;
      for (R** x : {&e, &w, &dfade, &dgate, &read}) claim(x, Cp);
      for (R** x : {&a, &fade}) claim(x, per_key ? keyed : Cp);
      for (R** x : {&last, &exponent, &dlast}) claim(x, Dp);
      if (per_key) for (R** x : {&q_faded, &k_faded}) claim(x, keyed);
      else q_faded = q, k_faded = k;
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
      if (call.before) store_state(call.before, job.first + c, W);
      relate();
      solve();
      multiply<R>(n, M, D, {q_faded, Dp, 1}, W, Mp, y, Mp, Into::set);
      if (per_head) scale_rows(y, fade);
      multiply<R>(n, M, n, {scores, Cp, 1}, u, Mp, y, Mp, Into::add, Part::lower);
      for (int64_t t = 0; t < n; ++t) {
        store_row(call.y, job.batch, time + t, job.head, job.column, M, y + t * Mp);
        finite &= all_finite(M, y + t * Mp);
      }
      // u is not needed any more, and what a step wrote has faded by Γ[C, t] when the chunk ends.
      if (per_head) scale_rows(u, reach + (n - 1) * Cp);
      fade_state(W);
      multiply<R>(D, M, n, per_key ? Operand<R>{k_T, Cp, 1} : Operand<R>{k, 1, Dp}, u, Mp, W, Mp, Into::add);
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
  R *q, *k, *k_T, *q_faded, *k_faded, *v, *u, *y, *scratch;
  // Γ, k_t·k_s, q_t·k_s, Γ ∘ q_t·k_s and A. With decays per key, products and keys are weighted by Γ already.
  R *reach, *keys, *products, *scores, *system;
  R *a, *e, *w, *fade, *last, *exponent;  // fade is γ, last is γ_C and exponent its logarithm
  R *dfade, *dlast, *dgate, *read, *da, *past;
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
    n = std::min(C, job->end - time);
    for (int64_t t = 0; t < n; ++t) {
      load_row(call.q, b, time + t, h / call.group, 0, D, q + t * Dp);
      load_row(call.k, b, time + t, h / call.group, 0, D, k + t * Dp);
      load_row(call.v, b, time + t, h, job->column, M, v + t * Mp);
      if (decay) load_row(call.a, b, time + t, h, 0, per_key ? D : 1, a + t * (per_key ? Dp : 1));
      if (erase) load_row(call.e, b, time + t, h, 0, 1, e + t);
      if (write) load_row(call.w, b, time + t, h, 0, 1, w + t);
    }
    if (decay && call.log) open_logarithms();
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

  void fade_state(R* x) const {
    if (!decay) return;
    for (int64_t d = 0; d < D; ++d) scale(M, last[per_key ? d : 0], x + d * Mp, x + d * Mp);
  }

  // Zeros in row t of a square, from column s on. What stood there may be of another chunk, so it must not be a factor.
  void clear(R* square, int64_t t, int64_t s) const { std::fill(square + t * Cp + s, square + (t + 1) * Cp, R(0)); }

  // Γ, γ, and how queries and keys of the chunk relate.
  void relate() {
    transpose(n, D, k, Dp, k_T, Cp);
    if (per_key) return relate_per_key();
    if (erase) multiply<R>(n, n, D, {k, Dp, 1}, k_T, Cp, keys, Cp, Into::set, Part::result);
    multiply<R>(n, n, D, {q, Dp, 1}, k_T, Cp, products, Cp, Into::set, Part::result);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = t * Cp;
      clear(products, t, t + 1);
      if (erase) clear(keys, t, t);
      if (erase) scale(C, e[t], keys + row, system + row);
      if (!per_head) continue;
      // Products, not quotients of products: exact for a gate that closes, and for any sign.
      if (t) scale(C, a[t], reach + row - Cp, reach + row);
      clear(reach, t, t + 1);
      reach[row + t] = 1;
      fade[t] = t ? a[t] * fade[t - 1] : a[t];
      hadamard(C, reach + row, products + row, scores + row);
      if (erase) hadamard(C, reach + row, system + row, system + row);
    }
    if (per_head && !call.log) last[0] = fade[n - 1];
  }

  // The same with decays per key.
  void relate_per_key() {
    decayed_products(Sizes{n, D, Dp, Cp}, a, q, k, k_T, reach, products, keys);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = t * Dp;
      clear(products, t, t + 1);
      clear(keys, t, t);
      if (erase) scale(C, e[t], keys + t * Cp, system + t * Cp);
      if (t) hadamard(D, a + row, fade + row - Dp, fade + row);
      else std::copy_n(a, Dp, fade);
      hadamard(D, fade + row, q + row, q_faded + row);
      hadamard(D, fade + row, k + row, k_faded + row);
    }
    if (!call.log) std::copy_n(fade + (n - 1) * Dp, Dp, last);
  }

  // u, what each step writes: (I + A) u = diag(w) v - diag(e γ) k W.
  void solve() {
    if (erase) multiply<R>(n, M, D, {k_faded, Dp, 1}, W, Mp, scratch, Mp, Into::set);
    for (int64_t t = 0; t < n; ++t) {
      scale(M, write ? w[t] : R(1), v + t * Mp, u + t * Mp);
      if (erase) add_scaled(M, per_head ? -e[t] * fade[t] : -e[t], scratch + t * Mp, u + t * Mp);
    }
    if (!erase) return;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t end = std::min(n, i + kBlock);
      multiply<R>(end - i, M, i, {system + i * Cp, Cp, 1}, u, Mp, u + i * Mp, Mp, Into::subtract);
      for (int64_t t = i + 1; t < end; ++t) {
        for (int64_t s = i; s < t; ++s) add_scaled(M, -system[t * Cp + s], u + s * Mp, u + t * Mp);
      }
    }
  }

  // x <- (I + A)^-T x.
  void solve_transposed(R* x) const {
    for (int64_t i = (n - 1) / kBlock * kBlock; i >= 0; i -= kBlock) {
      const int64_t end = std::min(n, i + kBlock);
      multiply<R>(end - i, M, n - end, {system + end * Cp + i, 1, Cp}, x + end * Mp, Mp, x + i * Mp, Mp,
                  Into::subtract);
      for (int64_t t = end - 2; t >= i; --t) {
        for (int64_t s = t + 1; s < end; ++s) add_scaled(M, -system[s * Cp + t], x + s * Mp, x + t * Mp);
      }
    }
  }

  // Chunk c as the forward pass had it, and du: the gradient of what each step writes.
  void reload(int64_t c) {
    load(c);
    for (int64_t t = 0; t < n; ++t) load_row(call.dy, job->batch, time + t, job->head, job->column, M, dy + t * Mp);
    load_state(call.before, job->first + c, W);
    relate();
    solve();
    multiply<R>(n, M, D, per_key ? Operand<R>{k_T, 1, Cp} : Operand<R>{k, Dp, 1}, dW, Mp, du, Mp, Into::set);
    if (per_head) scale_rows(du, reach + (n - 1) * Cp);
    multiply<R>(n, M, n, {scores, 1, Cp}, dy, Mp, du, Mp, Into::add, Part::upper);
    if (erase) solve_transposed(du);
  }

  // dW, from after the chunk to before it. Ruins dy and du.
  void rewind() {
    fade_state(dW);
    if (per_head) scale_rows(dy, fade);
    multiply<R>(D, M, n, {q_faded, 1, Dp}, dy, Mp, dW, Mp, Into::add);
    if (!erase) return;
    if (per_head) scale_rows(du, fade);
    scale_rows(du, e);
    multiply<R>(D, M, n, {k_faded, 1, Dp}, du, Mp, dW, Mp, Into::subtract);
  }

  void differentiate() {
    const int64_t b = job->batch, h = job->head;
    transpose(n, M, u, Mp, u_T, Cp);
    transpose(D, M, W, Mp, W_T, Dp);
    transpose(D, M, dW, Mp, dW_T, Dp);
    multiply<R>(n, D, M, {dy, Mp, 1}, W_T, Dp, dq, Dp, Into::set);
    multiply<R>(n, D, M, {u, Mp, 1}, dW_T, Dp, dk, Dp, Into::set);
    multiply<R>(n, n, M, {dy, Mp, 1}, u_T, Cp, dscores, Cp, Into::set, Part::result);
    for (int64_t t = 0; t < n; ++t) clear(dscores, t, t + 1);
    if (erase) {
      multiply<R>(n, D, M, {du, Mp, 1}, W_T, Dp, dread, Dp, Into::set);
      multiply<R>(n, n, M, {du, Mp, 1}, u_T, Cp, dsystem, Cp, Into::set, Part::result);
      for (int64_t t = 0; t < n; ++t) {
        clear(dsystem, t, t);
        read[t] = dot(D, dread + t * Dp, k_faded + t * Dp);
      }
    }
    if (per_head) differentiate_decay();
    for (int64_t t = 0; t < n; ++t) {
      const int64_t square = t * Cp, row = t * Dp;
      if (per_head) {
        scale(D, fade[t], dq + row, dq + row);
        scale(D, reach[(n - 1) * Cp + t], dk + row, dk + row);
        hadamard(C, reach + square, dscores + square, dscores + square);
      }
      if (!erase) continue;
      if (per_head) hadamard(C, reach + square, dsystem + square, dsystem + square);
      const R now = per_head ? fade[t] : R(1);
      dgate[t] = -dot(C, dsystem + square, keys + square) - now * read[t];
      scale(C, e[t], dsystem + square, dsystem + square);
      if (!per_key) add_scaled(D, -now * e[t], dread + row, dk + row);
    }
    if (erase) store_gate(call.de, dgate);
    if (per_key) {
      differentiate_per_key();
    } else {
      multiply<R>(n, D, n, {dscores, Cp, 1}, k, Dp, dq, Dp, Into::add, Part::lower);
      multiply<R>(n, D, n, {dscores, 1, Cp}, q, Dp, dk, Dp, Into::add, Part::upper);
      if (erase) {
        multiply<R>(n, D, n, {dsystem, Cp, 1}, k, Dp, dk, Dp, Into::subtract, Part::lower);
        multiply<R>(n, D, n, {dsystem, 1, Cp}, k, Dp, dk, Dp, Into::subtract, Part::upper);
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      share_row(call.dq, t, dq + t * Dp);
      share_row(call.dk, t, dk + t * Dp);
      finite &= all_finite(D, dq + t * Dp) && all_finite(D, dk + t * Dp);
      if (write) {
        dgate[t] = dot(M, du + t * Mp, v + t * Mp);
        scale(M, w[t], du + t * Mp, scratch);
      }
      store_row(call.dv, b, time + t, h, 0, M, write ? scratch : du + t * Mp);
    }
    if (write) store_gate(call.dw, dgate);
  }

  // da_r = sum over s < r <= t of dΓ[t, s] (a_{r+1} ⋯ a_t) (a_{s+1} ⋯ a_{r-1}), and the same for γ. Ruins products.
  void differentiate_decay() {
    R* dreach = products;
    for (int64_t t = 0; t < n; ++t) {
      R* row = dreach + t * Cp;
      hadamard(C, row, dscores + t * Cp, row);
      clear(dreach, t, t);
      if (erase) {
        hadamard(C, dsystem + t * Cp, keys + t * Cp, scratch);
        add_scaled(C, -e[t], scratch, row);
      }
      dfade[t] = dot(D, dq + t * Dp, q + t * Dp) - (erase ? e[t] * read[t] : R(0));
    }
    for (int64_t s = 0; s < n - 1; ++s) dreach[(n - 1) * Cp + s] += dot(D, dk + s * Dp, k + s * Dp);
    for (int64_t d = 0; d < D; ++d) dfade[n - 1] += dot(M, dW + d * Mp, W + d * Mp);
    for (int64_t t = n - 1; t >= 0; --t) {
      R* row = dreach + t * Cp;
      if (t + 1 < n) {
        dfade[t] += a[t + 1] * dfade[t + 1];
        add_scaled(C, a[t + 1], row + Cp, row);
        clear(dreach, t, t);
      }
      dgate[t] = t ? dfade[t] * fade[t - 1] + dot(C, row, reach + (t - 1) * Cp) : dfade[t];
    }
    if (call.log) hadamard(n, a, dgate, dgate);
    store_gate(call.da, dgate);
  }

  void differentiate_per_key() {
    for (int64_t d = 0; d < D; ++d) dlast[d] = dot(M, dW + d * Mp, W + d * Mp);
    decayed_gradients(Sizes{n, D, Dp, Cp}, a, q, k, erase ? e : nullptr, fade, dlast, dscores, dsystem, dread, past, dq, dk,
                      da);
    for (int64_t t = 0; t < n; ++t) {
      if (call.log) hadamard(D, a + t * Dp, da + t * Dp, da + t * Dp);
      store_row(call.da, job->batch, time + t, job->head, 0, D, da + t * Dp);
    }
  }

  // Gradients of q and k: the sum over the heads of a group, which come one after the other.
  void share_row(const View& x, int64_t t, const R* values) const {
    const int64_t h = job->head / call.group;
    if (job->head % call.group) add_row(x, job->batch, time + t, h, D, values);
    else store_row(x, job->batch, time + t, h, 0, D, values);
  }

  void store_gate(const View& x, const R* values) const {
    for (int64_t t = 0; t < n; ++t) store_row(x, job->batch, time + t, job->head, 0, 1, values + t);
  }

  // Steps that are solved one after the other, between matrix products.
  static constexpr int64_t kBlock = 4;
};
