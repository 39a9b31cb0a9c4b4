// Tabs, and the two views in them.

const data = JSON.parse($("data").textContent)
const tabs = ["model", "task"], views = { model: new ModelView(data), task: null }

function show(name, focus = false) {
  for (const tab of tabs) {
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name))
    $(`tab-${tab}`).tabIndex = tab === name ? 0 : -1
    $(`panel-${tab}`).hidden = tab !== name
    if (tab !== name && views[tab]) views[tab].clock.stop()
  }
  if (name === "task" && !views.task) views.task = new TaskView()
  views[name].draw()
  if (focus) $(`tab-${name}`).focus()
}

tabs.forEach((name, i) => {
  $(`tab-${name}`).addEventListener("click", () => show(name))
  $(`tab-${name}`).addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return
    event.preventDefault()
    show(tabs[(i + 1) % tabs.length], true)
  })
})
const redraw = () => { for (const view of Object.values(views)) if (view) view.draw() }
dark.addEventListener("change", redraw)
addEventListener("resize", redraw)
$("rounding").textContent = "Keys, queries and values are stored in 16 bits, and everything else is computed from " +
  `them here, in 64 bits. That changes what is read by at most ${+(100 * data.rounding).toPrecision(2)} %. ` +
  `Written by fastweights ${data.version}.`
show(location.hash === "#task" ? "task" : "model")
// For the console: look.replay(layer, head, "model" | "sum" | "delta").state(t).W
window.look = { data, views, show, replay: (...which) => views.model.replay(...which) }
