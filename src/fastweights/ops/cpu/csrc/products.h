// The backward pass through a whole chunk as a handful of matrix products, with the names and equations of ops/chunked.
// That pays where states are large; elsewhere quads are faster. Products are of elements E, see pairs.h, but those with
// triangles, and what is between products, are of numbers R.
#pragma once

#include "ahead.h"
#include "pairs.h"
#include "quad.h"
#include "simd.h"
#include "triangle.h"
#include "weights.h"

// One decay for each step, or none: `decay` and `erase` say what there is.
template <class R, class E>
class Products {
 public:
  Products(const QuadRows<R, E>& rows, int64_t tokens, bool decay, bool erase, bool write)
      : rows(rows), D(rows.D), Dp(rows.Dp), Mp(rows.Mp), De(rows.De), Me(padded<E>(elements<E>(Mp))), Cp(tokens),
        decay(decay), erase(erase), write(write) {}

  // Calls claim(x, count) for all room that it needs.
  template <class Claim>
  void claim_room(const Claim& claim) {
    claim(&rest, Cp * Mp);
    claim(&k_T, Cp * De);
    claim(&u_T, Cp * Me);
    for (E** x : {&room, &W_T, &dW_T}) claim(x, Me * Dp);
    if constexpr (kPaired) {
      for (E** x : {&dy_columns, &u_columns, &du_columns}) claim(x, Cp * Me);
      for (E** x : {&q_rows, &k_rows}) claim(x, Cp / 2 * Dp);
      for (E** x : {&W_rows, &dW_rows}) claim(x, Dp / 2 * Mp);
      claim(&square, Cp * Cp);
      claim(&values, Cp / 2 * Mp);
    } else {
      values = rest;
    }
    for (R** x : {&weights.reach, &weights.keys, &weights.products, &weights.system}) claim(x, Cp * Cp);
    for (R** x : {&dscores, &dsystem}) claim(x, Cp * Cp);
    if (decay) claim(&weights.scores, Cp * Cp);
    else weights.scores = weights.products;
    for (R** x : {&fade, &taken, &dfade, &dkept, &read, &last}) claim(x, Cp);
    claim(&triangle.inverses, Cp * kSquare<R>);
    weights.row = triangle.row = Cp;
    weights.fade = fade, triangle.A = weights.system;
  }

  // Takes the state before the chunk, D rows of M numbers that are `stride` apart: a copy, or pairs where they lie, if
  // these are whole vectors. To be called before anything else.
  void take(const typename Simd<E>::Number* from, int64_t stride, int64_t M) {
    constexpr int64_t depth = Simd<E>::depth;
    W = reinterpret_cast<const E*>(from), W_row = stride / depth;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(E) == 0 && stride % depth == 0;
    if (kPaired && aligned && D == Dp && M % (depth * Simd<E>::lanes) == 0) return;
    W = room, W_row = Me;
    for (int64_t d = 0; d < D; ++d, from += stride) {
      auto* row = reinterpret_cast<typename Simd<E>::Number*>(room + d * Me);
      std::memcpy(row, from, M * sizeof(*row));
      std::fill(row + M, row + Me * depth, typename Simd<E>::Number{});
    }
  }

  // u, and du from the gradient dW of the state after n tokens. `total` is by what the state fades, where it is known
  // better than as a product, and `gradients` whether `differentiate` will be called.
  void relate(int64_t n, int64_t M, const R* a, const R* e, const R* w, const R* total, const R* dW, Ahead& ahead,
              bool gradients) {
    this->n = weights.n = triangle.n = n, this->M = M, this->ahead = &ahead;
    weights.a = a, weights.e = e;
    transpose(n, elements<E>(D), rows.k, De, k_T, Cp);
    q = pairs_of_rows(n, D, rows.q, De, q_rows, Dp), k = pairs_of_rows(n, D, rows.k, De, k_rows, Dp);
    const E* before = laid_out(D, M, W, W_row, W_rows, Mp, gradients ? W_T : nullptr, Dp);
    const E* after = laid_out(D, M, dW, Mp, dW_rows, Mp, gradients ? dW_T : nullptr, Dp);
    if (erase) product(n, n, D, {rows.k, De, 1}, k_T, Cp, {weights.keys, Cp}, Part::result);
    product(n, n, D, {rows.q, De, 1}, k_T, Cp, {weights.products, Cp}, Part::result);
    if (decay) {
      for (int64_t t = 0; t < n; ++t) fade[t] = t ? a[t] * fade[t - 1] : a[t];
      last[0] = total ? *total : fade[n - 1];
    }
    for (int64_t t = 0; t < n; ++t) taken[t] = decay ? e[t] * fade[t] : e[t];
    if (erase) {
      decay ? weights.template weigh<true, true>() : weights.template weigh<false, true>();
      triangle.invert();
      product(n, M, D, {rows.k, De, 1}, before, Mp, {rest, Mp, rows.v, -1, write ? w : nullptr, taken});
      triangle.solve(M, rest, rows.u, Mp);
    } else {
      decay ? weights.template weigh<true, false>() : weights.template weigh<false, false>();
      for (int64_t t = 0; t < n; ++t) scale(M, w[t], rows.v + t * Mp, rows.u + t * Mp);
    }
    R* out = erase ? rest : rows.du;
    product(n, M, D, {rows.k, De, 1}, after, Mp, {out, Mp, nullptr, 1, nullptr, decay ? weights.kept() : nullptr});
    product(n, M, n, {pairs_of_rows(n, n, weights.scores, Cp, square, Cp), 1, Cp},
            pairs_of_rows(n, M, rows.dy, Mp, values, Mp), Mp, {out, Mp, out}, Part::upper);
    if (erase) triangle.solve_transposed(M, rest, rows.du, Mp);
  }

  // dW, from after the chunk to before it.
  void rewind(R* dW) {
    const E* read = pairs_of_rows(n, M, rows.dy, Mp, values, Mp, decay ? fade : nullptr);
    product(D, M, n, {q, 1, Dp}, read, Mp, {dW, Mp, dW, 1, decay ? last : nullptr, nullptr, true});
    if (!erase) return;
    const E* erased = pairs_of_rows(n, M, rows.du, Mp, values, Mp, taken);
    product(D, M, n, {k, 1, Dp}, erased, Mp, {dW, Mp, dW, -1});
  }

  // dq and dk in their rows, and the gradients of the gates.
  void differentiate(const R* dW, R* de, R* da) {
    R *dq = rows.dq, *dk = rows.dk, *dread = rows.dread;
    const E* u = pairs_of_columns(n, M, rows.u, Mp, u_columns, Me);
    const E* dy = pairs_of_columns(n, M, rows.dy, Mp, dy_columns, Me);
    transpose(n, elements<E>(M), u, Me, u_T, Cp);
    if constexpr (!kPaired) {
      transpose(D, M, W, Mp, W_T, Dp);
      transpose(D, M, dW, Mp, dW_T, Dp);
    }
    product(n, D, M, {dy, Me, 1}, W_T, Dp, {dq, Dp});
    product(n, D, M, {u, Me, 1}, dW_T, Dp, {dk, Dp});
    product(n, n, M, {dy, Me, 1}, u_T, Cp, {dscores, Cp}, Part::result);
    if (erase) {
      const E* du = pairs_of_columns(n, M, rows.du, Mp, du_columns, Me);
      product(n, D, M, {du, Me, 1}, W_T, Dp, {dread, Dp});
      product(n, n, M, {du, Me, 1}, u_T, Cp, {dsystem, Cp}, Part::result);
      for (int64_t t = 0; t < n; ++t) read[t] = dot(D, dread + t * Dp, rows.k + t * De);
    }
    if (decay) {
      for (int64_t t = 0; t < n; ++t) {
        dfade[t] = dot(D, dq + t * Dp, rows.q + t * De) - (erase ? weights.e[t] * read[t] : R(0));
        dkept[t] = dot(D, dk + t * Dp, rows.k + t * De);
        scale(D, fade[t], dq + t * Dp, dq + t * Dp);
        scale(D, weights.kept()[t], dk + t * Dp, dk + t * Dp);
      }
      erase ? unweigh<true, true>(de) : unweigh<true, false>(de);
      dfade[n - 1] += product_with_state(dW);
      weights.differentiate(dkept, dfade, da);
    } else {
      erase ? unweigh<false, true>(de) : unweigh<false, false>(de);
    }
    product(n, D, n, {pairs_of_columns(n, n, dscores, Cp, square, Cp), Cp, 1}, k, Dp, {dq, Dp, dq}, Part::lower);
    product(n, D, n, {pairs_of_rows(n, n, dscores, Cp, square, Cp), 1, Cp}, q, Dp, {dk, Dp, dk}, Part::upper);
    if (!erase) return;
    for (int64_t t = 0; t < n; ++t) add_scaled(D, -taken[t], dread + t * Dp, dk + t * Dp);
    product(n, D, n, {pairs_of_columns(n, n, dsystem, Cp, square, Cp), Cp, 1}, k, Dp, {dk, Dp, dk, -1}, Part::lower);
    product(n, D, n, {pairs_of_rows(n, n, dsystem, Cp, square, Cp), 1, Cp}, k, Dp, {dk, Dp, dk, -1}, Part::upper);
  }

 private:
  static constexpr bool kPaired = !std::is_same_v<R, E>;

  const QuadRows<R, E>& rows;
  const int64_t D, Dp, Mp, De, Me, Cp;
  const bool decay, erase, write;
  int64_t n = 0, M = 0;
  Ahead* ahead = nullptr;
  Weights<R> weights;
  Triangle<R> triangle;
  // fade is γ, last is γ_C, and taken what u takes of k W: e γ, or e.
  R *rest, *dscores, *dsystem, *fade, *taken, *dfade, *dkept, *read, *last;
  // The state before the chunk, its rows W_row apart.
  const E* W = nullptr;
  int64_t W_row = 0;
  E *room, *k_T, *u_T, *W_T, *dW_T;
  // Pairs of columns; pairs of rows; and what is needed for one product only. Of numbers, the operands themselves.
  E *dy_columns, *u_columns, *du_columns, *q_rows, *k_rows, *W_rows, *dW_rows, *square, *values;
  const E *q = nullptr, *k = nullptr;

  // The sum of the products of all elements of W and dW.
  R product_with_state([[maybe_unused]] const R* dW) const {
    using V = typename Simd<R>::Vector;
    if constexpr (kPaired) {
      constexpr int kSums = 4;
      V sums[kSums] = {};
      for (int64_t m = 0; m < Me; m += kSums) {
        for (int64_t d = 0; d < D; d += Simd<R>::lanes) {
#pragma GCC unroll 4
          for (int i = 0; i < kSums; ++i) {
            const int64_t at = (m + i) * Dp + d;
            add_products(sums[i], vector(dW_T + at), vector(W_T + at));
          }
        }
      }
      return sum_of<R>(sums[0] + sums[1] + (sums[2] + sums[3]));
    } else {
      V sums = {};
      for (int64_t d = 0; d < D; ++d) {
        for (int64_t j = 0; j < M; j += Simd<R>::lanes) sums += vector(dW + d * Mp + j) * vector(W + d * Mp + j);
      }
      return sum_of<R>(sums);
    }
  }

  template <bool Fades, bool Erases>
  void unweigh(R* de) {
    weights.template unweigh<Fades, Erases>(dscores, dsystem, read, de);
  }

  void product(int64_t rows, int64_t columns, int64_t inner, const Operand<E>& A, const E* B, int64_t b,
               const Result<R>& C, Part part = Part::all) {
    multiply<E>(rows, columns, inner, A, B, b, C, part, ahead);
  }
};
