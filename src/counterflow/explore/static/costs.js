// The form of costs: of one schedule, or of the model that all schemes are compared for. What there is to ask, the
// server says: each cost has a name, a label, help, a group, a kind, the words of a choice, and what is usual.
import { choice, el, field } from "./page.js";
import { costValue } from "./choices.js";

const UNITS = { stage: "one stage", worker: "a worker's share", model: "the whole model" };

// `given` is what was given by name, and is changed; `units` are those that costs may be given for, the first if none is said.
export function costForm(given, records, units, changed, { open = true } = {}) {
  const set = (cost, text) => {
    const value = costValue(cost, text);
    if (value === null) delete given[cost.name]; else given[cost.name] = value;
    changed();
  };
  const unit = given.costs_of ?? units[0], share = el("p", { class: "soft" });
  const said = name => { share.textContent = name === "stage" ? "One number for all stages, or one a stage: 1,1,2,1" : "One number, of which each stage has its part"; };
  said(unit);
  const of = field("costs of", choice(units.map(name => [name, UNITS[name]]), unit, name => {
    said(name);
    set({ name: "costs_of" }, name === units[0] ? "" : name);
  }));
  const rows = group => records.filter(cost => cost.group === group).map(cost => row(cost, given, set));
  return [of, share,
    el("details", { open: open && innerWidth > 860 }, el("summary", {}, "Seconds"), ...rows("seconds")),
    el("details", {}, el("summary", {}, "Links, syncs, recomputation"), ...rows("modes")),
    el("details", { open: records.some(cost => cost.group === "bytes" && given[cost.name]) }, el("summary", {}, "Bytes"), ...rows("bytes"))];
}

function row(cost, given, set) {
  const value = given[cost.name], title = cost.help;
  if (cost.words.length)
    return field(cost.label, choice([["", "usual"], ...cost.words], value === undefined ? "" : String(value), text => set(cost, text), { name: cost.name }), { title });
  const text = el("input", { name: cost.name, "data-field": cost.field, value: value ?? "", placeholder: cost.usual, oninput: () => set(cost, text.value) });
  if (cost.group !== "seconds") return field(cost.label, text, { title });
  // As far as four times what is usual.
  const usual = Number.isNaN(Number(cost.usual)) ? 1 : Number(cost.usual);
  const slider = el("input", { type: "range", min: 0, max: 4 * (usual || 0.5), step: "any", value: String(value ?? usual), "aria-label": `${cost.label}, slider`,
    oninput: () => { text.value = Number(Number(slider.value).toPrecision(3)); set(cost, text.value); } });
  text.inputMode = "decimal";
  text.addEventListener("input", () => { if (!Number.isNaN(Number(text.value))) slider.value = text.value; });
  return field(cost.label, text, { class: "cost", before: [slider], title });
}
