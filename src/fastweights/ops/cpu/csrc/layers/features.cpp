// phi of queries and keys, normalised and scaled, in one pass, forwards and backwards.
//
// A job is a few tokens of one head, so that what belongs to them stays in the first cache. Nothing is kept for the
// backward pass but what went in.
#include "threads.h"
#include "tokens.h"

namespace {

// Numbers in each array of a job.
constexpr int64_t kRoom = 2048;

// Mirrored by `Heads` in features.py. Queries are (B, Tq, H, r) and keys (B, Tk, H, r), and features of size D; T is 0
// where there are none. `dq` and `dk` are there in the backward pass.
struct Heads {
  Mapping mapping;
  int64_t wide, B, Tq, Tk, H;
  View q, k, phi_q, phi_k, dphi_q, dphi_k, dq, dk;
};

template <class R>
void run(const Heads& call) {
  const Features<R> to(call.mapping);
  const int64_t D = to.how.D, Dp = to.Dp, most = std::max<int64_t>(1, kRoom / Dp), rows = call.B * call.H;
  const int64_t tiles_q = (call.Tq + most - 1) / most, tiles_k = (call.Tk + most - 1) / most;
  for_each_job(rows * (tiles_q + tiles_k), 2 * rows * (call.Tq + call.Tk) * (to.how.r + D), [&](int64_t i) {
    const bool queries = i < rows * tiles_q;
    i -= queries ? 0 : rows * tiles_q;
    const int64_t tiles = queries ? tiles_q : tiles_k, T = queries ? call.Tq : call.Tk;
    // Heads of the same tokens one after another: they stand side by side in memory.
    const int64_t h = i % call.H, t = i / call.H % tiles * most, b = i / call.H / tiles, count = std::min(most, T - t);
    const View &dphi = queries ? call.dphi_q : call.dphi_k, &dx = queries ? call.dq : call.dk;
    Room<R> room(Tokens<R>::size(to, most) + most * Dp);
    Tokens<R> tokens(to, queries, most, room);
    tokens.load(queries ? call.q : call.k, b, t, count, h, dx.data);
    if (dx.data) {
      R* grad = room.take(most * Dp);
      load_rows(dphi, b, t, count, h, 0, D, grad, Dp);
      tokens.store_gradient(grad, dx, b, t, count, h);
    } else {
      store_rows(queries ? call.phi_q : call.phi_k, b, t, count, h, 0, D, tokens.phi, Dp);
    }
  });
}

}  // namespace

extern "C" void fastweights_features(const Heads* call) { call->wide ? run<double>(*call) : run<float>(*call); }
