// The mathematics: one memory W, key-major (row i belongs to entry i of the key), by the recurrence of the family
//   W = a W - e (a W k) k + w v k,   y = W q.
// Missing coefficients stand for a = 1, e = 0 and w = 1. All numbers are of 64 bits.

const dot = (x, y) => { let sum = 0; for (let i = 0; i < x.length; i++) sum += x[i] * y[i]; return sum }
const norm = x => Math.sqrt(dot(x, x))
const cosine = (x, y) => { const size = norm(x) * norm(y); return size > 0 ? dot(x, y) / size : 0 }
// What an empty memory returns is 0, as in the library.
const TINY = Math.sqrt(1.1754943508222875e-38)
const divide = (x, by) => Math.abs(by) < TINY ? 0 : x / by
// What a decay keeps of row i: there may be none, one for all rows, or one for each.
const keep = (a, i) => a === null ? 1 : typeof a === "number" ? a : a[i]

class Memory {
  constructor(D, M, attention = false) {
    Object.assign(this, { D, M, W: new Float64Array(D * M), z: attention ? new Float64Array(D) : null })
  }

  read(x) {
    const { D, M, W, z } = this, y = new Float64Array(M)
    for (let i = 0; i < D; i++) if (x[i]) for (let j = 0; j < M; j++) y[j] += x[i] * W[i * M + j]
    if (z) { const total = dot(x, z); for (let j = 0; j < M; j++) y[j] = divide(y[j], total) }
    return y
  }

  // Write v under k; returns what was found there and what was added.
  write(k, v, { a = null, e = null, w = null }) {
    const { D, M, W, z } = this
    if (a !== null) for (let i = 0; i < D; i++) {
      for (let j = 0; j < M; j++) W[i * M + j] *= keep(a, i)
      if (z) z[i] *= keep(a, i)
    }
    const found = this.read(k), change = new Float64Array(M)
    for (let j = 0; j < M; j++) change[j] = (w === null ? v[j] : w * v[j]) - (e === null ? 0 : e * found[j])
    for (let i = 0; i < D; i++) if (k[i]) for (let j = 0; j < M; j++) W[i * M + j] += k[i] * change[j]
    if (z) for (let i = 0; i < D; i++) z[i] += (e === null && w !== null ? w : 1) * k[i]
    return { found, change }
  }
}

// A head's whole text under one rule. `steps` has k(t), q(t), v(t) and at(t), the coefficients.
class Replay {
  constructor(steps) {
    this.steps = steps
    this.found = []; this.change = []; this.y = []; this.norms = []; this.divisors = []; this.largest = 0
    this.rewind()
    for (let t = 0; t < steps.T; t++) this.next(t, true)
  }

  rewind() { this.memory = new Memory(this.steps.D, this.steps.M, this.steps.attention); this.t = -1 }

  next(t, first) {
    const { steps, memory } = this, { k, v, q } = steps.get(t)
    let recalled = 1
    if (memory.z) {
      const { a = null } = steps.at(t)
      recalled = dot(k, memory.z.map((z, i) => z * keep(a, i)))
    }
    const { found, change } = memory.write(k, v, steps.at(t))
    this.t = t
    if (!first) return
    this.found.push(found); this.change.push(change); this.y.push(memory.read(q)); this.norms.push(norm(memory.W))
    this.divisors.push({ recalled, total: memory.z ? dot(q, memory.z) : 1 })
    for (const x of memory.W) this.largest = Math.max(this.largest, Math.abs(x))
  }

  // The memory after token t; computed again from the start where time runs backward.
  state(t) {
    if (t < this.t) this.rewind()
    while (this.t < t) this.next(this.t + 1, false)
    return this.memory
  }

  // How much of each value v_s is in what is read at t: exact, from the last step back to the first.
  weights(t) {
    const { steps } = this, { total } = this.divisors[t], g = Float64Array.from(steps.get(t).q)
    const weights = new Float64Array(steps.T)
    for (let s = t; s >= 0; s--) {
      const { k } = steps.get(s), { a = null, e = null, w = null } = steps.at(s), hit = dot(g, k)
      weights[s] = divide(w === null ? hit : w * hit, total)
      const erase = e === null ? 0 : steps.attention ? divide(e, this.divisors[s].recalled) : e
      for (let i = 0; i < g.length; i++) g[i] = keep(a, i) * (g[i] - erase * hit * k[i])
    }
    return weights
  }

  // The share of each earlier token in what is read at t, along y; they sum to 1.
  shares(t) {
    const y = this.y[t], size = dot(y, y)
    return this.weights(t).map((weight, s) => s > t || !(size > 0) ? 0 : weight * dot(this.steps.get(s).v, y) / size)
  }
}

// Arrays of the page: whole numbers of 16 bits with a scale for each head, or float32.
const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer
function decode(entry, H, complement) {
  if (!entry) return null
  if (entry.numbers) return { numbers: Float64Array.from(new Float32Array(bytes(entry.numbers))), N: 1 }
  const whole = new Int16Array(bytes(entry.whole)), each = whole.length / H
  const numbers = Float64Array.from(whole, (x, i) => {
    const scaled = x * entry.scales[Math.floor(i / each)]
    return complement ? 1 - scaled : scaled
  })
  return { numbers, each }
}

// One head of a recorded layer, as the steps of a replay. `rule` is "model", "sum" or "delta".
function headSteps(data, decoded, h, rule) {
  const { D, M, H, attention } = data, T = data.tokens.length
  const vector = (name, N, t) => decoded[name].numbers.subarray((h * T + t) * N, (h * T + t + 1) * N)
  const number = (name, t) => decoded[name] ? decoded[name].numbers[h * T + t] : null
  const fade = t => !decoded.a ? null : decoded.a.each ? vector("a", D, t) : number("a", t)
  const get = t => ({ k: vector("k", D, t), q: vector("q", D, t), v: vector("v", M, t) })
  const recorded = t => ({ a: fade(t), e: number("e", t), w: number("w", t) })
  const at = {
    model: recorded,
    sum: () => ({ a: null, e: null, w: null }),
    // With the model's own strength where it removes; one that was not trained to remove may have keys of any length.
    delta: t => {
      const { e, w } = recorded(t), strength = w === null ? 1 : w, k = vector("k", D, t), square = dot(k, k)
      const beta = e !== null || square <= 1 || attention ? strength : strength / square
      return { a: null, e: beta, w: beta }
    },
  }[rule]
  return { T, D, M, H, attention, get, at }
}
