// The backward pass through a whole chunk as a handful of matrix products, with the names and equations of ops/chunked.
// That pays where states are large; elsewhere quads are faster.
#pragma once

#include "ahead.h"
#include "quad.h"
#include "simd.h"
#include "triangle.h"
#include "weights.h"

// One decay for each step, or none: `decay` and `erase` say what there is.
template <class R>
class Products {
 public:
  Products(const QuadRows<R>& rows, int64_t tokens, bool decay, bool erase, bool write)
      : rows(rows), D(rows.D), Dp(rows.Dp), Mp(rows.Mp), Cp(tokens), decay(decay), erase(erase), write(write) {}

  // Calls claim(x, count) for all room that it needs.
  template <class Claim>
  void claim_room(const Claim& claim) {
    claim(&k_T, Cp * Dp);
    for (R** x : {&rest, &u_T}) claim(x, Cp * Mp);
    for (R** x : {&weights.reach, &weights.keys, &weights.products, &weights.system}) claim(x, Cp * Cp);
    for (R** x : {&dscores, &dsystem}) claim(x, Cp * Cp);
    if (decay) claim(&weights.scores, Cp * Cp);
    else weights.scores = weights.products;
    for (R** x : {&fade, &taken, &dfade, &dkept, &read, &last}) claim(x, Cp);
    claim(&triangle.inverses, Cp * kSquare<R>);
    for (R** x : {&W, &W_T, &dW_T}) claim(x, Dp * Mp);
    weights.row = triangle.row = Cp;
    weights.fade = fade, triangle.A = weights.system;
  }

  // The state before the chunk, its rows Mp apart; to be written before anything else is called.
  R* W = nullptr;

  // u, and du from the gradient dW of the state after n tokens. `total` is by what the state fades, where it is known
  // better than as a product.
  void relate(int64_t n, int64_t M, const R* a, const R* e, const R* w, const R* total, const R* dW, Ahead& ahead) {
    this->n = weights.n = triangle.n = n, this->M = M, this->ahead = &ahead;
    weights.a = a, weights.e = e;
    transpose(n, D, rows.k, Dp, k_T, Cp);
    if (erase) product(n, n, D, {rows.k, Dp, 1}, k_T, Cp, {weights.keys, Cp}, Part::result);
    product(n, n, D, {rows.q, Dp, 1}, k_T, Cp, {weights.products, Cp}, Part::result);
    if (decay) {
      for (int64_t t = 0; t < n; ++t) fade[t] = t ? a[t] * fade[t - 1] : a[t];
      last[0] = total ? *total : fade[n - 1];
    }
    for (int64_t t = 0; t < n; ++t) taken[t] = decay ? e[t] * fade[t] : e[t];
    if (erase) {
      decay ? weights.template weigh<true, true>() : weights.template weigh<false, true>();
      triangle.invert();
      product(n, M, D, {rows.k, Dp, 1}, W, Mp, {rest, Mp, rows.v, -1, write ? w : nullptr, taken});
      triangle.solve(M, rest, rows.u, Mp);
    } else {
      decay ? weights.template weigh<true, false>() : weights.template weigh<false, false>();
      for (int64_t t = 0; t < n; ++t) scale(M, w[t], rows.v + t * Mp, rows.u + t * Mp);
    }
    R* out = erase ? rest : rows.du;
    product(n, M, D, {rows.k, Dp, 1}, dW, Mp, {out, Mp, nullptr, 1, nullptr, decay ? weights.kept() : nullptr});
    product(n, M, n, {weights.scores, 1, Cp}, rows.dy, Mp, {out, Mp, out}, Part::upper);
    if (erase) triangle.solve_transposed(M, rest, rows.du, Mp);
  }

  // dW, from after the chunk to before it. Ruins dy.
  void rewind(R* dW) {
    if (decay) for (int64_t t = 0; t < n; ++t) scale(M, fade[t], rows.dy + t * Mp, rows.dy + t * Mp);
    product(D, M, n, {rows.q, 1, Dp}, rows.dy, Mp, {dW, Mp, dW, 1, decay ? last : nullptr, nullptr, true});
    if (!erase) return;
    for (int64_t t = 0; t < n; ++t) scale(M, taken[t], rows.du + t * Mp, rest + t * Mp);
    product(D, M, n, {rows.k, 1, Dp}, rest, Mp, {dW, Mp, dW, -1});
  }

  // dq and dk in their rows, and the gradients of the gates.
  void differentiate(const R* dW, R* de, R* da) {
    R *dq = rows.dq, *dk = rows.dk, *dread = rows.dread;
    transpose(n, M, rows.u, Mp, u_T, Cp);
    transpose(D, M, W, Mp, W_T, Dp);
    transpose(D, M, dW, Mp, dW_T, Dp);
    product(n, D, M, {rows.dy, Mp, 1}, W_T, Dp, {dq, Dp});
    product(n, D, M, {rows.u, Mp, 1}, dW_T, Dp, {dk, Dp});
    product(n, n, M, {rows.dy, Mp, 1}, u_T, Cp, {dscores, Cp}, Part::result);
    if (erase) {
      product(n, D, M, {rows.du, Mp, 1}, W_T, Dp, {dread, Dp});
      product(n, n, M, {rows.du, Mp, 1}, u_T, Cp, {dsystem, Cp}, Part::result);
      for (int64_t t = 0; t < n; ++t) read[t] = dot(D, dread + t * Dp, rows.k + t * Dp);
    }
    if (decay) {
      for (int64_t t = 0; t < n; ++t) {
        dfade[t] = dot(D, dq + t * Dp, rows.q + t * Dp) - (erase ? weights.e[t] * read[t] : R(0));
        dkept[t] = dot(D, dk + t * Dp, rows.k + t * Dp);
        scale(D, fade[t], dq + t * Dp, dq + t * Dp);
        scale(D, weights.kept()[t], dk + t * Dp, dk + t * Dp);
      }
      erase ? unweigh<true, true>(de) : unweigh<true, false>(de);
      typename Simd<R>::Vector sums = {};
      for (int64_t d = 0; d < D; ++d) {
        for (int64_t j = 0; j < M; j += Simd<R>::lanes) sums += vector(dW + d * Mp + j) * vector(W + d * Mp + j);
      }
      dfade[n - 1] += sum_of<R>(sums);
      weights.differentiate(dkept, dfade, da);
    } else {
      erase ? unweigh<false, true>(de) : unweigh<false, false>(de);
    }
    product(n, D, n, {dscores, Cp, 1}, rows.k, Dp, {dq, Dp, dq}, Part::lower);
    product(n, D, n, {dscores, 1, Cp}, rows.q, Dp, {dk, Dp, dk}, Part::upper);
    if (!erase) return;
    for (int64_t t = 0; t < n; ++t) add_scaled(D, -taken[t], dread + t * Dp, dk + t * Dp);
    product(n, D, n, {dsystem, Cp, 1}, rows.k, Dp, {dk, Dp, dk, -1}, Part::lower);
    product(n, D, n, {dsystem, 1, Cp}, rows.k, Dp, {dk, Dp, dk, -1}, Part::upper);
  }

 private:
  const QuadRows<R>& rows;
  const int64_t D, Dp, Mp, Cp;
  const bool decay, erase, write;
  int64_t n = 0, M = 0;
  Ahead* ahead = nullptr;
  Weights<R> weights;
  Triangle<R> triangle;
  // fade is γ, last is γ_C, and taken what u takes of k W: e γ, or e.
  R *k_T, *rest, *u_T, *dscores, *dsystem, *fade, *taken, *dfade, *dkept, *read, *last, *W_T, *dW_T;

  template <bool Fades, bool Erases>
  void unweigh(R* de) {
    weights.template unweigh<Fades, Erases>(dscores, dsystem, read, de);
  }

  void product(int64_t rows, int64_t columns, int64_t inner, const Operand<R>& A, const R* B, int64_t b,
               const Result<R>& C, Part part = Part::all) {
    multiply<R>(rows, columns, inner, A, B, b, C, part, ahead);
  }
};
