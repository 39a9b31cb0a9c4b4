// Second tab: the paper's task of writing and overwriting, computed here.

// Random numbers that are the same for the same seed.
function randomNumbers(seed) {
  const uniform = () => {
    seed = seed + 0x6D2B79F5 | 0
    let x = Math.imul(seed ^ seed >>> 15, 1 | seed)
    x = x + Math.imul(x ^ x >>> 7, 61 | x) ^ x
    return ((x ^ x >>> 14) >>> 0) / 4294967296
  }
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform())
  const direction = d => {
    const x = Float64Array.from({ length: d }, normal), size = norm(x)
    return x.map(one => one / size)
  }
  return { uniform, direction }
}

class Task {
  constructor(d, S, seed) {
    Object.assign(this, { d, S, random: randomNumbers(seed), keys: [], values: [], log: [], last: null })
    this.memories = { sum: new Memory(d, d), delta: new Memory(d, d) }
    this.history = { sum: [0], delta: [0] }
    // Orthogonal as long as there is room; further keys point anywhere.
    for (let i = 0; i < S; i++) {
      let key = this.random.direction(d)
      if (i < d) {
        for (let again = 0; again < 2; again++) for (const other of this.keys) {
          const overlap = dot(key, other)
          key = key.map((x, j) => x - overlap * other[j])
        }
        const size = norm(key)
        key = key.map(x => x / size)
      }
      this.keys.push(key)
    }
  }

  get writes() { return this.history.sum.length - 1 }

  // Write the next key that has no value, or a new value under one that has.
  write() {
    const fresh = this.values.length < this.S
    const i = fresh ? this.values.length : Math.floor(this.random.uniform() * this.S)
    const old = fresh ? null : this.values[i]
    this.values[i] = this.random.direction(this.d)
    this.memories.sum.write(this.keys[i], this.values[i], {})
    this.memories.delta.write(this.keys[i], this.values[i], { e: 1, w: 1 })
    this.last = { i, old, value: this.values[i] }
    for (const rule of ["sum", "delta"]) {
      const errors = this.errors(rule)
      this.history[rule].push(errors.reduce((sum, one) => sum + one, 0) / errors.length)
    }
  }

  answer(rule, i) { return this.memories[rule].read(this.keys[i]) }

  error(rule, i) { const found = this.answer(rule, i); return norm(found.map((x, j) => x - this.values[i][j])) }

  errors(rule) { return this.values.map((_, i) => this.error(rule, i)) }
}

class TaskView {
  constructor() {
    this.seed = 1
    this.clock = new Clock($("task-play"), () => { this.task.write(); this.draw(); return this.task.writes < 400 }, 220)
    const strip = () => element("canvas", { class: "strip", "aria-hidden": "true" })
    this.canvas = Object.fromEntries(["sum", "delta"].map(rule => {
      const W = element("canvas", { class: "strip W", role: "img" }), answer = strip(), wanted = strip()
      const note = element("p", { class: "note" })
      const grid = element("div", { class: "matrix plain" }, element("span", { class: "row" }, "W"), W,
        element("span", { class: "row", title: "the value written last" }, "v"), wanted,
        element("span", { class: "row", title: "what its key reads now" }, "v̄"), answer)
      const about = rule === "sum" ? "W + v k: adds" : "W + (v − W k) k: replaces"
      $("task-memories").append(element("figure", { class: `panel ${rule}` },
        element("figcaption", {}, element("strong", {}, rule), element("span", { class: "about" }, about)), grid, note))
      return [rule, { W, answer, wanted, note }]
    }))
    $("task-d").addEventListener("change", () => this.reset(true))
    $("task-S").addEventListener("input", () => this.reset())
    const fill = () => { while (this.task.values.length < this.task.S) this.task.write() }
    $("task-write").addEventListener("click", () => this.step(() => this.task.write()))
    $("task-all").addEventListener("click", () => this.step(fill))
    $("task-play").addEventListener("click", () => this.clock.toggle())
    $("task-reset").addEventListener("click", () => { this.seed++; this.reset() })
    legend($("task-legend"), [["sum", "sum"], ["delta", "delta"]])
    legend($("bars-legend"), [["sum", "sum"], ["delta", "delta"]])
    this.reset(true)
    // A first picture: every key was written, and as many were overwritten.
    while (this.task.writes < 2 * this.task.S) this.task.write()
    this.draw()
  }

  reset(resize = false) {
    this.clock.stop()
    const d = +$("task-d").value
    if (resize) { $("task-S").max = 2 * d; $("task-S").value = d }
    const S = +$("task-S").value
    $("task-count").textContent = S
    this.task = new Task(d, S, this.seed)
    this.draw()
  }

  step(act) { this.clock.stop(); act(); this.draw(); $("live").textContent = $("task-story").textContent }

  draw() {
    const { task } = this, { d, last } = task
    for (const rule of ["sum", "delta"]) {
      const { W, answer, wanted, note } = this.canvas[rule], memory = task.memories[rule]
      const largest = memory.W.reduce((most, x) => Math.max(most, Math.abs(x)), 0)
      pixels(W, memory.W, d, d, largest)
      const values = last ? [last.value, task.answer(rule, last.i)] : [new Float64Array(d), new Float64Array(d)]
      const top = Math.max(...values.map(x => x.reduce((most, one) => Math.max(most, Math.abs(one)), 0)))
      pixels(wanted, values[0], d, 1, top); pixels(answer, values[1], d, 1, top)
      const mean = task.history[rule][task.writes]
      const latest = last ? ` · of the last write ${short(task.error(rule, last.i))}` : ""
      note.textContent = `mean error ${short(mean)}${latest}`
      W.setAttribute("aria-label", `Fast weights by the ${rule} rule after ${task.writes} writes, ${note.textContent}`)
    }
    this.tell()
    this.bars()
    const high = Math.min(3, Math.max(1, ...task.history.sum, ...task.history.delta)) * 1.05
    const limit = task.writes > task.S ? { at: task.S, name: "overwriting begins" } : null
    const series = ["sum", "delta"].map(rule => ({ style: rule, values: task.history[rule] }))
    lines($("task-history"), series, { mark: task.writes, most: high, limit })
  }

  // What happened last, in one sentence.
  tell() {
    const { task } = this, { last } = task
    if (!last) { $("task-story").textContent = "The memories are empty. Write an association."; return }
    const [sum, delta] = ["sum", "delta"].map(rule => short(task.error(rule, last.i)))
    const what = last.old ? `overwrote key ${last.i + 1}` : `stored a value under key ${last.i + 1}`
    const why = last.old ? "the sum rule answers with old and new together" : "nothing was there before"
    $("task-story").textContent = `Write ${task.writes} ${what}: ${why}. Error of sum ${sum}, of delta ${delta}.`
  }

  // The error of every key, by both rules.
  bars() {
    const { task } = this, svg = $("task-bars"), width = Math.max(260, svg.clientWidth || 480), height = 150
    const left = 34, right = width - 6, base = 128, high = 2, marks = []
    const errors = { sum: task.errors("sum"), delta: task.errors("delta") }
    const each = (right - left) / task.S, y = value => base - Math.min(high, value) / high * (base - 10)
    for (const value of [0, 1, 2]) marks.push(
      element("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value === 2 ? "≥ 2" : String(value)))
    for (let i = 0; i < task.values.length; i++) ["sum", "delta"].forEach((rule, n) => {
      const thick = Math.max(1, each * .36), value = errors[rule][i]
      const x = (left + each * i + each * .12 + n * thick).toFixed(1), top = Math.min(y(value), base - 1)
      marks.push(element("rect",
        { class: `fill ${rule}`, x, y: top.toFixed(1), width: thick.toFixed(1), height: (base - top).toFixed(1) },
        element("title", {}, `key ${i + 1}, ${rule}: error ${short(value)}`)))
    })
    marks.push(element("text", { x: left, y: height - 4 }, "key 1"),
      element("text", { x: right, y: height - 4, "text-anchor": "end" }, `key ${task.S}`))
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`)
    svg.setAttribute("aria-label", `Error of every key. Largest of the sum rule ${short(Math.max(0, ...errors.sum))}, ` +
      `of the delta rule ${short(Math.max(0, ...errors.delta))}.`)
    svg.replaceChildren(...marks)
  }
}
