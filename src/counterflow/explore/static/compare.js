// Compare: all schemes for one model on so many workers, the quickest first; each opens in Schedules.
import { Errors, ask, el, field, percent, shownAgain, split, table } from "./page.js";
import { search } from "./jobs.js";
import { costForm } from "./costs.js";
import { costsFrom, toAddress } from "./choices.js";

const USUAL = { workers: "8", micro_batches: "16", peak: "8", memory: "", seconds: "10" };

export async function show(place) {
  const { costs: records } = await ask("/api/schemes");
  const given = new URLSearchParams(location.search), state = {}, costs = costsFrom(given, records);
  for (const name in USUAL) state[name] = given.get(name) ?? (given.size ? "" : USUAL[name]);
  const side = el("form", { "aria-label": "What is compared", onsubmit: event => { event.preventDefault(); run(); } });
  const errors = new Errors(side), found = el("div");

  function changed() {
    const kept = new URLSearchParams();
    for (const name in USUAL) if (state[name]) kept.set(name, state[name]);
    for (const [name, value] of Object.entries(costs)) kept.set(name, value);
    history.replaceState(null, "", `/compare?${kept}`);
  }
  const text = (label, name, placeholder, more = {}) => {
    const input = el("input", { name, value: state[name], placeholder, ...more, oninput: () => { state[name] = input.value; changed(); } });
    return field(label, input);
  };
  const number = name => state[name] === "" ? null : Number(state[name]);
  const begin = () => ask("/api/compare", { workers: number("workers"), micro_batches: number("micro_batches"), peak: number("peak"),
    memory: state.memory || null, seconds: number("seconds") ?? 0, costs });
  const { buttons, progress, run } = search("Compare", begin, async answer => shown(answer), errors);
  side.append(
    el("fieldset", {}, el("legend", {}, "Size"), text("workers", "workers", "", { type: "number", min: 1 }), text("micro-batches", "micro_batches", "", { type: "number", min: 1 })),
    el("fieldset", {}, el("legend", {}, "Limits of a worker"),
      text("activations", "peak", "none", { type: "number", min: 0, step: "any" }), text("memory", "memory", "16GiB"),
      el("p", { class: "soft" }, "Activations are those of a worker's share of the model, for one micro-batch.")),
    el("fieldset", {}, el("legend", {}, "Costs"), ...costForm(costs, records, ["worker", "model"], changed)),
    el("fieldset", {}, el("legend", {}, "Computed orders"), text("seconds", "seconds", "0: none", { type: "number", min: 0 })), buttons);
  place.append(el("h1", {}, "Compare"), errors.place, split("Size, limits, costs", side, progress, found));
  run();

  function shown(answer) {
    const columns = [["scheme", row => el("button", { type: "button", title: "Open in Schedules", onclick: () => open(row) }, row.name), true],
      ["step", "step"], ["", bar, true], ["over best", "over"], ["bubbles", "bubbles"], ["activations", "activations"], ["weights", "weights"]];
    if (answer.rows.some(row => row.memory)) columns.push(["peak memory", "memory"]);
    columns.push(["", "remark", true]);
    found.replaceChildren(el("h2", {}, answer.heading),
      answer.rows.length ? table("All schemes, the quickest first", columns, answer.rows) : el("p", { class: "wrong" }, "No schedule keeps the limits."),
      answer.too_large ? el("p", { class: "soft" }, `${answer.too_large} schedule${answer.too_large === 1 ? " needs" : "s need"} more than the limits.`) : "",
      el("p", { class: "soft" }, "Every row computes the same model. Weights are copies of a worker's share of it, versions included. Click a scheme to open it in Schedules."),
      ...answer.left_out.map(text => el("p", { class: "soft" }, text)));
    shownAgain();
  }

  // With the same costs, of a worker's share or of the model: a second schedule beside it computes the same model.
  async function open(row) {
    try {
      const subject = { options: row.options ?? {}, moves: [], costs: { costs_of: "worker", ...costs } };
      if (row.scheme) subject.scheme = row.scheme;
      else Object.assign(subject, await ask("/api/file", { name: row.name, text: row.schedule }), { name: row.name });
      location.href = toAddress({ subjects: [subject], peak: "", memory: "", messages: false }, "/schedules");
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
