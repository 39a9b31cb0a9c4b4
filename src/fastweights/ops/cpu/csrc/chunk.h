// One chunk of one head, forwards and backwards, in rows of float or double: its tokens, and the passes over them four
// at a time.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "ahead.h"
#include "call.h"
#include "products.h"
#include "quad_gradients.h"
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
template <class R, class E>
class Chunk {
 public:
  Chunk(const Call& call, bool backward)
      : call(call), forwards(!backward), decay(call.a.data), per_key(decay && call.per_key), erase(call.e.data),
        write(call.w.data), D(call.D), C(call.C), Dp(padded<R>(D)), Mp(padded<R>(call.M)), width(per_key ? Dp : 1),
        tokens((C + kSquare<R> - 1) / kSquare<R> * kSquare<R>),
        by_products(kPaired || (!per_key && D * call.M > kQuadsUpTo * kQuadsUpTo)),
        products(rows, tokens, decay, erase, write), stride(backward && by_products ? Mp : kBlock) {
    const int64_t fours = tokens / kQuad, keyed = tokens * Dp, valued = tokens * Mp, block = Dp * kBlock;
    for (int pass = 0; pass < 2; ++pass) {
      size = 0;
      for (E** x : {&q, &k}) claim(x, tokens * rows.De);
      for (R** x : {&v, &y}) claim(x, valued);
      for (R** x : {&e, &w}) claim(x, tokens);
      for (R** x : {&a, &lasts}) claim(x, tokens * width);
      for (R** x : {&exponent, &total, &start}) claim(x, Dp);
      claim(&factors, fours * kFactors);
      claim(&W, Dp * (Mp + kBlock));
      if (per_key) {
        claim(&rows.fade, keyed);
        for (E** x : {&rows.q_read, &rows.k_read, &rows.k_kept}) claim(x, keyed);
      }
      if (kPaired) claim(&k_kept, tokens / 2 * Dp);
      if (backward) {
        for (R** x : {&rows.u, &rows.dy, &rows.du}) claim(x, valued);
        for (R** x : {&rows.dq, &rows.dk, &rows.dread}) claim(x, keyed);
        for (R** x : {&de, &dw}) claim(x, tokens);
        claim(&da, tokens * width);
        if (by_products) {
          products.claim_room([&](auto** x, int64_t count) { claim(x, count); });
        } else {
          claim(&dlasts, fours * Dp);
          claim(&states, fours * block);
          for (R** x : {&W_T, &dW_T}) claim(x, block);
        }
      }
      if (pass == 0) {
        arena.reset(static_cast<R*>(std::aligned_alloc(kVectorBytes, size * sizeof(R))));
        if (!arena) return;
        std::memset(arena.get(), 0, size * sizeof(R));
      }
    }
    if (!decay) std::fill_n(a, tokens, R(1));
    if (!write) std::fill_n(w, tokens, R(1));
  }

  bool ready() const { return arena != nullptr; }

  // Whether every y, or every gradient of q and k, was finite so far.
  bool finite = true;

  void forward(const Job& job) {
    begin(job);
    load_state(call.W, job.sequence);
    for (int64_t c = 0; c < job.chunks(C); ++c) {
      load(c);
      expect(c, c + 1);
      if (call.before) store_state(static_cast<Kept*>(call.before), job.first + c);
      relate(true);
      for (int64_t j = 0; j < M; j += kBlock) dispatch(j, [&](auto erases, auto vectors) { pass<erases, vectors>(j); });
      if (rows.y == y) store_rows<kPaired>(call.y, job.batch, time, n, job.head, job.column, M, y, Mp);
      check(M, rows.y, rows.y_row);
    }
    store_state(static_cast<R*>(call.W_end), job.sequence);
  }

  // Backwards through all chunks; `gradients` says whether to compute more than the gradients of the states.
  void backward(const Job& job, bool gradients) {
    begin(job);
    if (call.dW_end) load_state(call.dW_end, job.sequence);
    else std::fill_n(W, Dp * (Mp + kBlock), R(0));
    for (int64_t c = job.chunks(C) - 1; c >= 0; --c) {
      if (!gradients) store_state(static_cast<R*>(call.after), job.first + c);
      go_back(c, gradients);
    }
    store_state(static_cast<R*>(call.dW_start), job.sequence);
  }

  // The gradients of chunk c, the gradient of the state after it being known.
  void backward_alone(const Job& job, int64_t c) {
    begin(job);
    load_state(call.after, job.first + c);
    go_back(c, true);
  }

 private:
  using Kept = typename Simd<E>::Number;  // in which states before chunks are kept
  static constexpr bool kPaired = !std::is_same_v<R, E>;
  // Columns that are computed together, room for a quad, and the largest square state for which quads are faster
  // backwards than products.
  static constexpr int64_t kBlock = kQuadVectors * Simd<R>::lanes, kFactors = sizeof(Quad<R, E>) / sizeof(R),
                           kQuadsUpTo = 32;
  // The largest heads whose rows are used where they lie, if they can be.
  static constexpr int64_t kInPlaceUpTo = 64;

  const Call& call;
  const bool forwards, decay, per_key, erase, write;
  const int64_t D, C, Dp, Mp;
  const int64_t width, tokens;  // of the decays of a token, and how many tokens there is room for
  QuadRows<R, E> rows{D, Dp, Mp};
  const bool by_products;
  Products<R, E> products;
  const int64_t stride;  // of the rows of W
  int64_t M = 0, n = 0, time = 0;  // columns of the job, tokens of the chunk and the first of them
  const Job* job = nullptr;
  struct Free {
    void operator()(R* x) const { std::free(x); }
  };
  std::unique_ptr<R[], Free> arena;
  int64_t size = 0;
  // Rows that were copied, or will be, and pairs of rows of k.
  E *q, *k, *k_kept;
  R *v, *y;
  // Decays and gates, and of the former the sum of their logarithms and its exponential; room for quads, see Fading.
  R *a, *e, *w, *exponent, *total, *start, *lasts, *factors;
  // The state or, backwards, its gradient: blocks of columns one after the other, which keeps a block's rows together.
  // One block of all columns if they go by products.
  R* W;
  // Gradients of decays and gates. Without products also, for a block of columns, the states before every four tokens,
  // one of them and its gradient transposed, and the products of the rows of these two.
  R *da, *de, *dw, *states, *W_T, *dW_T, *dlasts;
  Ahead ahead;

  template <class X>
  void claim(X** x, int64_t count) {
    static_assert(sizeof(X) == sizeof(R));
    *x = arena ? reinterpret_cast<X*>(arena.get() + size) : nullptr;
    size += padded<R>(count);
  }

  void begin(const Job& next) {
    job = &next;
    M = next.columns;
  }

  int64_t quads() const { return (n + kQuad - 1) / kQuad; }
  Quad<R, E>& quad(int64_t i) const { return reinterpret_cast<Quad<R, E>*>(factors)[i]; }

  // Calls work(erases, vectors) with what is known when compiling: whether the rule erases, and how many vectors of
  // columns there are from j on.
  template <class Work>
  void dispatch(int64_t j, const Work& work) const {
    const auto choose = [&](auto erases) {
      if (M - j > kBlock - Simd<R>::lanes) work(erases, std::integral_constant<int, kQuadVectors>());
      else work(erases, std::integral_constant<int, 1>());
    };
    erase ? choose(std::true_type()) : choose(std::false_type());
  }

  // Columns of a state, from `column` of the job on, as rows that are `stride` apart.
  void load_columns(const void* states, int64_t index, int64_t column, int64_t stride, R* out) const {
    const R* in = static_cast<const R*>(states) + (index * call.H + job->head) * D * call.M + job->column + column;
    const int64_t columns = std::min(stride, M - column);
    for (int64_t d = 0; d < D; ++d) {
      std::memcpy(out + d * stride, in + d * call.M, columns * sizeof(R));
      // The padding may hold what NaN times zero left of another sequence.
      std::fill(out + d * stride + columns, out + d * stride + padded<R>(columns), R(0));
    }
  }

  void load_state(const void* states, int64_t index) const {
    for (int64_t j = 0; j < M; j += stride) load_columns(states, index, j, stride, W + j * Dp);
  }

  template <class X>
  void store_state(X* states, int64_t index) const {
    X* out = states + (index * call.H + job->head) * D * call.M + job->column;
    for (int64_t j = 0; j < M; j += stride) {
      const R* in = W + j * Dp;
      const int64_t columns = std::min(stride, M - j);
      for (int64_t d = 0; d < D; ++d) convert<kPaired>(columns, in + d * stride, out + d * call.M + j);
    }
  }

  const Kept* kept(int64_t c) const {
    return static_cast<const Kept*>(call.before) + ((job->first + c) * call.H + job->head) * D * call.M + job->column;
  }

  // Finds rows of a tensor where they lie, `apart` elements from one to the next; false where they have to be copied:
  // rows of another type, parts of elements, of vectors or of a quad, and large heads, whose rows drive each other out
  // of the first cache.
  template <class X>
  bool found(const View& x, int64_t head, int64_t from, int64_t size, X*& at, int64_t& apart) const {
    constexpr int64_t depth = Simd<X>::depth;
    if (!forwards || per_key || x.kind != kind_of<X> || std::max(D, call.M) > kInPlaceUpTo) return false;
    char* first = x.at(job->batch, time, head) + from * x.bytes;
    if (reinterpret_cast<uintptr_t>(first) % sizeof(X) || x.time % depth) return false;
    if (size % (depth * Simd<X>::lanes) || n % kQuad) return false;
    at = reinterpret_cast<X*>(first), apart = x.time / depth;
    return true;
  }

  void load(int64_t c) {
    const int64_t b = job->batch, h = job->head, keyed = h / call.group, from = job->column;
    time = job->start + c * C;
    n = std::min(C, job->end - time);
    rows.q = q, rows.k = k, rows.v = v, rows.y = y;
    rows.q_row = rows.k_row = rows.De, rows.v_row = rows.y_row = Mp;
    if (!found(call.q, keyed, 0, D, rows.q, rows.q_row)) load_rows(call.q, b, time, n, keyed, 0, D, q, rows.De);
    if (!found(call.k, keyed, 0, D, rows.k, rows.k_row)) load_rows(call.k, b, time, n, keyed, 0, D, k, rows.De);
    if (!found(call.v, h, from, M, rows.v, rows.v_row)) load_rows(call.v, b, time, n, h, from, M, v, Mp);
    found(call.y, h, from, M, rows.y, rows.y_row);
    if (!per_key) rows.q_read = rows.q, rows.k_read = rows.k_kept = rows.k;
    if (decay) load_rows(call.a, b, time, n, h, 0, per_key ? D : 1, a, width);
    if (erase) load_rows(call.e, b, time, n, h, 0, 1, e, 1);
    if (write) load_rows(call.w, b, time, n, h, 0, 1, w, 1);
    if (decay && call.log) open_logarithms();
    // Tokens that the last four lack read and write nothing.
    for (int64_t t = n; t < quads() * kQuad; ++t) {
      for (E* x : {q, k}) std::fill_n(x + t * rows.De, rows.De, E{});
      for (R* x : {v, rows.dy}) if (x) std::fill_n(x + t * Mp, padded<R>(M), R(0));
      std::fill_n(a + t * width, width, R(1));
      e[t] = 0, w[t] = 1;
    }
    if constexpr (kPaired) {
      if (forwards) rows.k_kept = k_kept, pairs_of_rows(quads() * kQuad, D, rows.k, rows.k_row, k_kept, Dp);
    }
  }

  // Has the passes of this chunk ask the memory for a tensor's part in chunk c.
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
    if (kPaired && !forwards && next >= 0) {
      ahead.add(reinterpret_cast<const char*>(kept(next)), call.M * sizeof(Kept), D, M * sizeof(Kept), false);
    }
  }

  // From logarithms to decays.
  void open_logarithms() {
    std::fill_n(exponent, Dp, R(0));
    for (int64_t t = 0; t < n; ++t) {
      if (per_key) std::fill(a + t * Dp + D, a + (t + 1) * Dp, R(0));
      for (int64_t d = 0; d < width; ++d) exponent[d] += a[t * width + d];
    }
    exponential(width, exponent, total);
    exponential(n * width, a, a);
  }

  // Notes whether all of some rows is finite.
  void check(int64_t columns, const R* x, int64_t stride) {
    constexpr R most = std::numeric_limits<R>::max();
    typename Simd<R>::Ints outside = {};
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < columns; j += Simd<R>::lanes) {
        const typename Simd<R>::Vector now = loose(x + t * stride + j);
        outside |= ~((now <= most) & (now >= -most));
      }
    }
    for (int i = 0; i < Simd<R>::lanes; ++i) finite &= outside[i] == 0;
  }

  // The factors of all quads; the state may wait until it fades, as in Fading, if it is only to be read.
  void relate(bool waits) {
    const Fading<R> fading{a, waits && decay && call.log ? exponent : nullptr, total, start, lasts, waits};
    for (int64_t i = 0; i < quads(); ++i) {
      const bool final = i + 1 == quads();
      if (!per_key) quad(i).template relate<false>(rows, i * kQuad, fading, e, w, final);
      else if constexpr (!kPaired) quad(i).template relate<true>(rows, i * kQuad, fading, e, w, final);
    }
  }

  // y and the state, in columns from j on.
  template <bool Erases, int Vectors>
  void pass(int64_t j) {
    for (int64_t i = 0; i < quads(); ++i) {
      ahead.ask(2 * kQuad);
      R *state = W + j * Dp, *last = lasts + i * width;
      const bool fades = per_key || *last != R(1);
      fades ? quad(i).template pass<Erases, Vectors, false, true>(rows, i * kQuad, j, last, per_key, state, state, kBlock)
            : quad(i).template pass<Erases, Vectors, false, false>(rows, i * kQuad, j, last, 0, state, state, kBlock);
    }
  }

  // From the gradient of the state after chunk c to that before it. One copy for all ways of sharing out: in several, a
  // compiler may reassociate sums in several ways.
  [[gnu::noinline, gnu::noclone]] void go_back(int64_t c, bool gradients) {
    load(c);
    load_rows(call.dy, job->batch, time, n, job->head, job->column, M, rows.dy, Mp);
    expect(c, c - 1);
    if (by_products) go_back_by_products(c, gradients);
    else if constexpr (!kPaired) go_back_by_quads(c, gradients);
    if (gradients) store_gradients();
  }

  void go_back_by_products(int64_t c, bool gradients) {
    products.take(kept(c), call.M, M);
    products.relate(n, M, a, e, w, decay && call.log ? total : nullptr, W, ahead, gradients);
    if (gradients) products.differentiate(W, de, da);
    products.rewind(W);
  }

  void go_back_by_quads(int64_t c, bool gradients) {
    relate(false);
    if (gradients) {
      for (R* x : {rows.dq, rows.dk, rows.dread}) std::fill_n(x, quads() * kQuad * Dp, R(0));
      std::fill_n(dlasts, quads() * Dp, R(0));
    }
    for (int64_t j = 0; j < M; j += kBlock) {
      load_columns(call.before, job->first + c, j, kBlock, states);
      dispatch(j, [&](auto erases, auto vectors) { pass_back<erases, vectors>(j, gradients); });
    }
    if (gradients) erase ? differentiate<true>() : differentiate<false>();
  }

  template <bool Erases>
  void differentiate() {
    for (int64_t i = 0; i < quads(); ++i) {
      const QuadGradients<R> four{quad(i), rows, i * kQuad, M};
      if (per_key) four.template per_key<Erases>(a, dlasts + i * Dp, de, da);
      else four.template per_head<Erases>(dlasts + i * Dp, de, da);
    }
  }

  // For columns from j on: u forwards, and backwards du, dW and, with `gradients`, the sums over columns.
  template <bool Erases, int Vectors>
  void pass_back(int64_t j, bool gradients) {
    const int64_t block = Dp * kBlock, columns = std::min(kBlock, M - j);
    for (int64_t i = 0; i < quads(); ++i) {
      R *from = states + i * block, *to = i + 1 < quads() ? from + block : nullptr;
      quad(i).template pass<Erases, Vectors, true, true>(rows, i * kQuad, j, lasts + i * width, per_key, from, to, kBlock);
    }
    for (int64_t i = quads() - 1; i >= 0; --i) {
      ahead.ask(2 * kQuad);
      if (gradients) {
        transpose(D, columns, W + j * Dp, kBlock, dW_T, Dp);
        transpose(D, columns, states + i * block, kBlock, W_T, Dp);
      }
      quad(i).template pass_back<Erases, Vectors>(rows, i * kQuad, j, lasts + i * width, per_key, W + j * Dp, kBlock);
      if (!gradients) continue;
      ahead.ask(2 * kQuad);
      quad(i).template contract<Erases>(rows, i * kQuad, j, columns, W_T, dW_T, dlasts + i * Dp);
    }
  }

  void store_gradients() {
    const int64_t b = job->batch, h = job->head;
    // Those of q and k: the sum over the heads of a group, which come one after the other.
    const bool add = h % call.group;
    store_rows<kPaired>(call.dq, b, time, n, h / call.group, 0, D, rows.dq, Dp, add);
    store_rows<kPaired>(call.dk, b, time, n, h / call.group, 0, D, rows.dk, Dp, add);
    check(D, rows.dq, Dp);
    check(D, rows.dk, Dp);
    if (decay) {
      if (call.log) hadamard(n * width, a, da, da);
      store_rows(call.da, b, time, n, h, 0, per_key ? D : 1, da, width);
    }
    if (erase) store_rows(call.de, b, time, n, h, 0, 1, de, 1);
    if (write) {
      for (int64_t t = 0; t < n; ++t) {
        dw[t] = dot(M, rows.du + t * Mp, rows.v + t * Mp);
        scale(M, w[t], rows.du + t * Mp, rows.du + t * Mp);
      }
      store_rows(call.dw, b, time, n, h, 0, 1, dw, 1);
    }
    store_rows<kPaired>(call.dv, b, time, n, h, 0, M, rows.du, Mp);
  }
};
