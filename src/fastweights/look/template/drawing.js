// Drawing: colours that follow the page's scheme, matrices as pixels, lines and bars as SVG.

const $ = id => document.getElementById(id)
const dark = matchMedia("(prefers-color-scheme: dark)")

function element(name, attributes = {}, ...children) {
  const space = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(name)
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name)
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value)
  made.append(...children)
  return made
}

const rgb = name => {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim()
  return [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16))
}
let palette = null
const colours = () => palette ??= { plus: rgb("--plus"), minus: rgb("--minus"), zero: rgb("--zero") }
dark.addEventListener("change", () => { palette = null })

// Numbers as pixels, one each; CSS stretches the canvas. Small ones are lifted, so that they can be seen.
function pixels(canvas, numbers, width, height, largest) {
  const { plus, minus, zero } = colours()
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height })
  const context = canvas.getContext("2d"), image = context.createImageData(width, height)
  for (let i = 0; i < numbers.length; i++) {
    const share = largest > 0 ? Math.min(1, Math.abs(numbers[i]) / largest) ** .7 : 0
    const end = numbers[i] < 0 ? minus : plus
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = zero[c] + share * (end[c] - zero[c])
    image.data[4 * i + 3] = 255
  }
  context.putImageData(image, 0, 0)
}

const short = x => {
  if (x === null || x === undefined || Number.isNaN(x)) return "–"
  // What is left of 0 after rounding is 0.
  const size = Math.abs(x) < 1e-12 ? 0 : Math.abs(x)
  return size !== 0 && (size < .005 || size >= 10000) ? x.toExponential(1).replace("e+", "e") :
    size === 0 ? "0.00" : x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2).replace("-", "−")
}
const percent = x => {
  const text = (100 * x).toFixed(Math.abs(x) < .0995 ? 1 : 0)
  return `${/^-?[0.]+$/.test(text) ? "0" : text.replace("-", "−")} %`
}

// A matrix with its key and query beside it, and values below: the write is their outer product.
class Panel {
  constructor(parent, title, about, style) {
    this.canvas = Object.fromEntries(["k", "q", "W", "v", "found", "change", "y"].map(name =>
      [name, element("canvas", { class: `strip ${name}`, "aria-hidden": "true" })]))
    const { k, q, W, v, found, change, y } = this.canvas
    W.removeAttribute("aria-hidden"); W.setAttribute("role", "img")
    this.note = element("p", { class: "note" })
    const row = (label, words, canvas) => [
      element("span", { class: "row", title: words }, label), canvas]
    const grid = element("div", { class: "matrix" },
      element("span", { class: "corner" }), element("span", { class: "top", title: "key" }, "k"),
      element("span", { class: "top", title: "query" }, "q"), element("span", { class: "top wide" }, "W"),
      element("span", { class: "corner" }), k, q, W,
      ...row("v", "value", v), ...row("v̄", "retrieved: what the key finds", found),
      ...row("Δ", "correction: what is added under the key", change), ...row("y", "read: what the query finds", y))
    this.figure = element("figure", { class: `panel ${style}` },
      element("figcaption", {}, element("strong", {}, title), element("span", { class: "about" }, about)), grid,
      this.note)
    parent.append(this.figure)
  }

  draw({ k, q, v, found, change, y, W, D, M, largest }, label, note) {
    const top = (...vectors) => Math.max(...vectors.map(x => x.reduce((most, one) => Math.max(most, Math.abs(one)), 0)))
    const keys = top(k, q), values = top(v, found, change, y)
    pixels(this.canvas.k, k, 1, D, keys); pixels(this.canvas.q, q, 1, D, keys)
    pixels(this.canvas.W, W, M, D, largest)
    for (const [name, x] of Object.entries({ v, found, change, y })) pixels(this.canvas[name], x, M, 1, values)
    this.canvas.W.setAttribute("aria-label", label)
    // As high as it is, unless that is much higher than wide; but every row stays at least two pixels high.
    this.canvas.W.style.aspectRatio = `1 / ${Math.min(D / M, Math.max(1.25, D / 180))}`
    this.note.textContent = note
  }
}

// Lines over time. `series` is a list of { name, style, values }; `mark` a point in time that can be moved there.
function lines(svg, series, { mark = null, most = null, unit = "", from = 0, limit = null } = {}) {
  const width = Math.max(260, svg.clientWidth || 480), height = 190, left = 44, right = 10, top = 10, bottom = 26
  const count = Math.max(2, ...series.map(one => one.values.length))
  const high = most ?? (Math.max(...series.flatMap(one => [...one.values]).filter(Number.isFinite), 1e-9) * 1.08)
  const x = t => left + t / (count - 1) * (width - left - right)
  const y = value => height - bottom - value / high * (height - top - bottom)
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`)
  const marks = []
  const step = 10 ** Math.floor(Math.log10(high))
  const each = [.1, .2, .25, .5, 1, 2, 5].map(n => n * step).find(n => high / n <= 4.5)
  for (let value = 0; value <= high * 1.0001; value += each) {
    marks.push(element("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${+value.toPrecision(3)}${unit}`))
  }
  for (const t of [0, Math.round((count - 1) / 2), count - 1]) marks.push(element("text", {
    x: x(t), y: height - 7, "text-anchor": t === 0 ? "start" : t === count - 1 ? "end" : "middle" }, String(t + from)))
  if (limit !== null) marks.push(
    element("line", { class: "limit", x1: x(limit.at), x2: x(limit.at), y1: top, y2: height - bottom }),
    element("text", { x: x(limit.at) + (limit.at > count / 2 ? -5 : 5), y: top + 10,
      "text-anchor": limit.at > count / 2 ? "end" : "start" }, limit.name))
  for (const { style, values } of series) {
    const points = [...values].map((value, t) =>
      `${t ? "L" : "M"}${x(t).toFixed(1)} ${y(Math.min(value, high)).toFixed(1)}`)
    marks.push(element("path", { class: `line ${style}`, d: points.join("") }))
  }
  if (mark !== null) {
    marks.push(element("line", { class: "now", x1: x(mark), x2: x(mark), y1: top, y2: height - bottom }))
    for (const { style, values } of series) if (mark < values.length) marks.push(
      element("circle", { class: `dot ${style}`, cx: x(mark), cy: y(Math.min(values[mark], high)), r: 4 }))
  }
  svg.replaceChildren(...marks)
  // Where in time a pointer is.
  svg.when = event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width
    return Math.max(0, Math.min(count - 1, Math.round((at - left) / (width - left - right) * (count - 1))))
  }
}

function legend(list, entries) {
  list.replaceChildren(...entries.map(([style, name]) =>
    element("li", {}, element("span", { class: `swatch ${style}`, "aria-hidden": "true" }), name)))
}

// Play, one step after the other, until told to stop.
class Clock {
  constructor(button, step, milliseconds) { Object.assign(this, { button, step, milliseconds, timer: null }) }
  get running() { return this.timer !== null }
  toggle() { if (this.running) this.stop(); else this.start() }
  start() {
    this.timer = setInterval(() => { if (!this.step()) this.stop() }, this.milliseconds)
    this.button.setAttribute("aria-label", "Pause"); this.button.textContent = "❚❚"
  }
  stop() {
    clearInterval(this.timer); this.timer = null
    this.button.setAttribute("aria-label", "Play"); this.button.textContent = "▶"
  }
}
