// First tab: a text as the model read it.

class ModelView {
  constructor(data) {
    Object.assign(this, { data, decoded: new Map(), t: 0, hovered: null })
    this.T = data.tokens.length
    this.clock = new Clock($("play"), () => this.go(this.t + 1), 250)
    this.build()
    this.choose()
    this.go(Math.min(this.T - 1, Math.ceil(this.T / 3)))
  }

  build() {
    const { data } = this, { rule } = data
    const size = `${data.layers} layers of ${data.H} heads, keys of ${data.D} and values of ${data.M} numbers`
    const cost = data.perplexity === null ? "" : `, perplexity ${data.perplexity}`
    $("about").textContent = `Rule ${rule}, feature map ${data.map}, normalisation ${data.normalization}; ${size}. ` +
      `It reads ${this.T} tokens${cost}.`
    const update = data.update.replace("<-", "←").replace(/v_bar/g, "v̄").replace(/\bbeta\b/g, "β")
    $("update").textContent = `Rule ${rule}: ${update}`
    const choice = (id, n, most) => $(id).append(element("option", { value: n }, `${n} of ${most}`))
    for (const { layer } of data.blocks) choice("layer", layer, data.layers)
    for (let h = 1; h <= data.H; h++) choice("head", h, data.H)
    $("layer").value = data.start[0]; $("head").value = data.start[1]
    $("time").max = this.T - 1
    this.tokens = data.tokens.map((token, t) => {
      const made = element("span", { role: "option", class: "token", tabindex: -1, "aria-selected": "false" },
        token.replace(/\n/g, "⏎") || "·")
      made.setAttribute("aria-label", this.name(t))
      made.addEventListener("pointerenter", event => { if (event.pointerType === "mouse") this.hover(t) })
      made.addEventListener("click", () => { this.clock.stop(); this.go(t, true); made.focus() })
      return made
    })
    data.tokens.forEach((token, t) => {
      $("tokens").append(this.tokens[t], ...(token.endsWith("\n") ? [element("br")] : []))
    })
    $("tokens").addEventListener("pointerleave", () => this.hover(null))
    $("tokens").addEventListener("focusin", event => {
      const t = this.tokens.indexOf(event.target)
      if (t >= 0 && t !== this.t) this.go(t, true)
    })
    this.rules = ["model", ...["sum", "delta"].filter(name => name !== rule)]
    const names = {
      model: [rule, "the model’s own rule"],
      sum: ["sum", "same keys: adds, removes nothing"],
      delta: ["delta", "same keys: replaces, nothing fades"],
    }
    this.panels = this.rules.map(name => new Panel($("memories"), ...names[name], name))
    for (const id of ["layer", "head"]) $(id).addEventListener("change", () => this.choose())
    const jump = t => { this.clock.stop(); this.go(t, true) }
    $("time").addEventListener("input", () => jump(+$("time").value))
    const buttons = { first: () => 0, back: () => this.t - 1, forward: () => this.t + 1, last: () => this.T - 1 }
    for (const [id, when] of Object.entries(buttons)) $(id).addEventListener("click", () => jump(when()))
    $("play").addEventListener("click", () => this.play())
    document.addEventListener("keydown", event => this.key(event))
    for (const id of ["norms", "gates"]) $(id).addEventListener("pointerdown", event => jump($(id).when(event)))
    legend($("norms-legend"), this.rules.map(name => [name, name === "model" ? rule : name]))
  }

  play() {
    if (!this.clock.running && this.t === this.T - 1) this.go(0)
    this.clock.toggle()
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }, leap = { ArrowUp: -10, ArrowDown: 10, Home: -this.T, End: this.T }
    const onToken = event.target.classList.contains("token"), inField = event.target.matches("select, input, button, a")
    if ($("panel-model").hidden || event.altKey || event.ctrlKey || event.metaKey || inField) return
    // Elsewhere on the page these keys scroll.
    if (onToken && event.key === " ") { event.preventDefault(); this.play(); return }
    const moves = onToken ? { ...step, ...leap } : step
    if (!(event.key in moves)) return
    event.preventDefault()
    this.clock.stop()
    this.go(this.t + moves[event.key], true)
    if (onToken) this.tokens[this.t].focus()
  }

  // A token in words, for labels.
  name(t) {
    const token = this.data.tokens[t]
    return token === "" ? "part of a character" : token.replace(/\n/g, " end of line").trim() || "space"
  }

  // Replay the chosen head under each rule.
  choose() {
    const layer = +$("layer").value, h = +$("head").value - 1
    this.replays = this.rules.map(name => this.replay(layer, h + 1, name))
    const steps = this.replays[0].steps, at = [...Array(this.T).keys()].map(t => steps.at(t))
    const mean = a => typeof a === "number" ? a : a.reduce((x, y) => x + y, 0) / a.length
    const names = {
      w: this.data.tied || at[0].e === null ? "β, strength of the write" : "w, strength of the write",
      e: "e, strength of the removal",
      a: at[0].a?.length ? "decay, mean over key channels" : "decay, what is kept",
    }
    this.gates = Object.entries(names).filter(([name]) => at[0][name] !== null && !(name === "e" && this.data.tied))
      .map(([name, words]) => ({ name: words, style: `gate-${name}`, values: at.map(one => mean(one[name])) }))
    $("gates-figure").hidden = !this.gates.length
    legend($("gates-legend"), this.gates.map(one => [one.style, one.name]))
    this.draw()
  }

  replay(layer, head, rule = "model") {
    const block = this.data.blocks.find(one => one.layer === layer)
    if (!this.decoded.has(layer)) this.decoded.set(layer, Object.fromEntries(
      ["q", "k", "v", "a", "e", "w"].map(name => [name, decode(block[name], this.data.H, name === "a")])))
    return new Replay(headSteps(this.data, this.decoded.get(layer), head - 1, rule))
  }

  // Move to token t; says whether that was a step forward or back. `speak` tells screen readers.
  go(t, speak = false) {
    const next = Math.max(0, Math.min(this.T - 1, t)), moved = next !== this.t
    this.tokens[this.t].tabIndex = -1; this.tokens[this.t].setAttribute("aria-selected", "false")
    this.t = next
    this.tokens[next].tabIndex = 0; this.tokens[next].setAttribute("aria-selected", "true")
    $("time").value = next
    $("time").setAttribute("aria-valuetext", `token ${next + 1} of ${this.T}: ${this.name(next)}`)
    $("where").textContent = `${next + 1} / ${this.T}`
    this.draw()
    if (speak && !this.clock.running) $("live").textContent = this.summary()
    return moved && next < this.T - 1
  }

  hover(t) { this.hovered = t; this.shade() }

  sources(t) {
    const shares = this.replays[0].shares(t)
    return [...shares].map((share, s) => ({ s, share })).slice(0, t + 1)
      .sort((a, b) => Math.abs(b.share) - Math.abs(a.share))
  }

  summary() {
    const best = this.sources(this.t).slice(0, 3).map(({ s, share }) => `“${this.name(s)}” ${percent(share)}`)
    return `Token ${this.t + 1}, “${this.name(this.t)}”: read from ${best.join(", ")}`
  }

  draw() {
    const { t, data } = this
    this.replays.forEach((replay, i) => {
      const { largest, found: { [t]: found }, change: { [t]: change }, y: { [t]: y } } = replay
      const { W } = replay.state(t), { k, q, v } = replay.steps.get(t), { D, M } = data
      const rule = i ? this.rules[i] : data.rule
      const [size, fits, length] = [replay.norms[t], cosine(found, v), norm(change)].map(short)
      this.panels[i].draw({ k, q, v, found, change, y, W, D, M, largest },
        `Fast weights by the rule ${rule} after token ${t + 1}: norm ${size}; the key found a value of cosine ${fits} ` +
        `with the new one, the correction has length ${length}`,
        `‖W‖ ${size} · colours to ±${short(largest)} · cos(v̄, v) ${fits} · ‖Δ‖ ${length}`)
    })
    const norms = this.replays.map((replay, i) => ({ style: this.rules[i], values: replay.norms }))
    lines($("norms"), norms, { mark: t, from: 1 })
    const most = Math.max(1, ...this.gates.flatMap(one => one.values))
    if (this.gates.length) lines($("gates"), this.gates, { mark: t, from: 1, most })
    this.facts()
    this.shade()
  }

  facts() {
    const { t, data } = this, replay = this.replays[0], { k, q, v } = replay.steps.get(t)
    const rows = [
      ["token", `“${this.name(t)}”`],
      ["cost of the token", data.bits[t] === null ? "nothing predicts the first" : `${data.bits[t]} bits`],
      ...this.gates.map(one => [one.name, short(one.values[t])]),
      ["value ‖v‖", short(norm(v))], ["retrieved ‖v̄‖", short(norm(replay.found[t]))],
      ["correction ‖Δ‖", short(norm(replay.change[t]))], ["read ‖y‖", short(norm(replay.y[t]))],
      ["cos(q, k)", short(cosine(q, k))],
    ]
    $("facts").replaceChildren(...rows.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, words)]))
  }

  // Colour the tokens by their share in what is read at the token pointed at, or else the current one.
  shade() {
    const t = this.hovered ?? this.t, shares = this.replays[0].shares(t)
    const largest = Math.max(...shares.map(Math.abs), 1e-9)
    this.tokens.forEach((token, s) => {
      const share = shares[s] / largest
      token.style.setProperty("--share", s > t ? 0 : Math.min(1, Math.abs(share)).toFixed(3))
      token.classList.toggle("minus", share < 0)
      token.classList.toggle("later", s > t)
      token.classList.toggle("current", s === t)
    })
    $("sources-title").textContent = `Where the read at “${this.name(t)}” came from`
    const top = this.sources(t).slice(0, 6), widest = Math.max(...top.map(one => Math.abs(one.share)), 1e-9)
    $("sources").replaceChildren(...top.map(({ s, share }) => element("tr", {},
      element("td", {}, String(s + 1)), element("th", { scope: "row" }, this.name(s)),
      element("td", { class: "number" }, percent(share)),
      element("td", { class: "bar", "aria-hidden": "true" }, element("span", {
        class: share < 0 ? "minus" : "plus", style: `width: ${(100 * Math.abs(share) / widest).toFixed(1)}%` })))))
    const rest = this.sources(t).slice(6).reduce((sum, one) => sum + one.share, 0)
    $("sources-rest").textContent = t < 6 ? "All writes so far." : `The other ${t - 5} writes: ${percent(rest)}.`
  }
}
