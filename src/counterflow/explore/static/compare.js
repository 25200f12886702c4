// Compare: all schemes for one model on so many workers, the quickest first; each opens in Schedules.
import { Errors, ask, choice, el, field, percent, table } from "./page.js";
import { search } from "./jobs.js";
import { BYTES, COSTS, costValue, toAddress } from "./choices.js";

const NUMBERS = ["workers", "micro_batches", "peak", "seconds"], TEXTS = ["memory", "costs_of"];
const USUAL = { workers: "8", micro_batches: "16", peak: "8", memory: "", seconds: "10", costs_of: "worker" };

export async function show(place) {
  const given = new URLSearchParams(location.search), state = {}, costs = {};
  for (const name of [...NUMBERS, ...TEXTS]) state[name] = given.get(name) ?? (given.size ? "" : USUAL[name]);
  state.costs_of ||= "worker";
  for (const name of [...COSTS, ...BYTES]) if (given.has(name)) costs[name] = costValue(name, given.get(name));
  const errors = new Errors(), found = el("div");

  function changed() {
    const kept = new URLSearchParams();
    for (const name of [...NUMBERS, ...TEXTS]) if (state[name]) kept.set(name, state[name]);
    for (const [name, value] of Object.entries(costs)) kept.set(name, value);
    history.replaceState(null, "", `/compare?${kept}`);
  }
  const text = (label, name, placeholder, more = {}) => {
    const input = el("input", { value: state[name], placeholder, ...more, oninput: () => { state[name] = input.value; changed(); } });
    return field(label, input);
  };
  const count = (label, name, placeholder = "") => text(label, name, placeholder, { type: "number", min: 1 });
  const cost = (name, placeholder) => {
    const input = el("input", { value: costs[name] ?? "", placeholder, inputmode: "decimal", oninput: () => {
      costs[name] = costValue(name, input.value);
      if (costs[name] === null) delete costs[name];
      changed();
    } });
    return field(name === "p2p" ? "message" : name.replaceAll("_", " "), input);
  };
  const number = name => state[name] === "" ? null : Number(state[name]);
  const begin = () => ask("/api/compare", { workers: number("workers"), micro_batches: number("micro_batches"), peak: number("peak"),
    memory: state.memory || null, seconds: number("seconds") ?? 0, costs_of: state.costs_of, costs });
  const told = now => [`${now.done} of ${now.of}: ${now.doing}`, now.done / now.of];
  const usual = { forward: 1, backward: 2, input_gradient: "half", weight_gradient: "rest", p2p: 0, sync: 0, agreement: 0 };
  const side = el("form", { "aria-label": "What is compared", onsubmit: e => e.preventDefault() },
    el("fieldset", {}, el("legend", {}, "Size"), count("workers", "workers"), count("micro-batches", "micro_batches")),
    el("fieldset", {}, el("legend", {}, "Limits of a worker"),
      text("activations", "peak", "none", { inputmode: "decimal" }), text("memory", "memory", "16GiB"),
      el("p", { class: "soft" }, "Activations count in those of a worker's share of the model for one micro-batch.")),
    el("fieldset", {}, el("legend", {}, "Costs"),
      field("costs of", choice([["worker", "a worker's share of the model"], ["model", "the whole model"]], state.costs_of, value => { state.costs_of = value; changed(); })),
      ...COSTS.map(name => cost(name, usual[name])),
      el("details", {}, el("summary", {}, "Bytes"), ...BYTES.map(name => cost(name, name === "layers" ? "1" : "300MB")))),
    el("fieldset", {}, el("legend", {}, "Computed orders"), text("seconds", "seconds", "0: none", { type: "number", min: 0 })),
    search("Compare", begin, told, async answer => shown(answer), errors, { atOnce: true }));
  place.append(el("h1", {}, "Compare"), errors.place, el("div", { class: "split-page" }, side, found));

  function shown(answer) {
    const columns = [["scheme", row => el("button", { type: "button", title: "Open in Schedules", onclick: () => open(row) }, row.name), true],
      ["step", "step"], ["", bar, true], ["over best", "over"], ["bubbles", "bubbles"], ["activations", "activations"], ["weights", "weights"]];
    if (answer.rows.some(row => row.memory)) columns.push(["peak memory", "memory"]);
    columns.push(["", "remark", true]);
    found.replaceChildren(el("h2", {}, answer.heading),
      answer.rows.length ? table("All schemes, the quickest first", columns, answer.rows) : el("p", { class: "wrong" }, "No schedule keeps the limits."),
      answer.too_large ? el("p", { class: "soft" }, `${answer.too_large} schedule${answer.too_large === 1 ? " needs" : "s need"} more than the limits.`) : "",
      el("p", { class: "soft" }, "Every row computes the same model. Weights are copies of a worker's share of it, versions included."),
      ...answer.left_out.map(text => el("p", { class: "soft" }, text)));
    document.documentElement.dataset.shown = String(Number(document.documentElement.dataset.shown || 0) + 1);
  }

  async function open(row) {
    try {
      const subject = { options: row.options ?? {}, moves: [] };
      if (row.scheme) subject.scheme = row.scheme;
      else Object.assign(subject, await ask("/api/file", { name: row.name, text: row.schedule }), { name: row.name });
      location.href = toAddress({ subjects: [subject], costs: row.costs, peak: "", memory: "", messages: false }, "/schedules");
    } catch (error) { errors.say(error); }
  }
}

// A row's step beside the longest, with its idle part empty.
function bar(row) {
  const width = 110 * row.length, busy = width * (1 - row.bubble), hue = row.synchronous ? ["#96c8fe", "#215dac"] : ["#fcbc48", "#986214"];
  return el("svg", { width: 112, height: 14, viewBox: "0 0 112 14", role: "img", "aria-label": `idle ${percent(row.bubble)} of ${row.step}` },
    el("rect", { x: 1, y: 1, width, height: 12, fill: "none", stroke: hue[1] }),
    el("rect", { x: 1, y: 1, width: busy, height: 12, fill: hue[0], stroke: hue[1] }));
}
