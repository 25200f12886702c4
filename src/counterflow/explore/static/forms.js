// The forms of the page of schedules: of a schedule, of costs, of limits.
import { ask, choice, el, field, tick } from "./page.js";
import { BYTES, COSTS, costValue, optionValue } from "./choices.js";

const words = name => name.replaceAll("_", " ");

export function subjectForm(state, index, schemes, { changed, rebuild, errors }) {
  const subject = state.subjects[index], own = el("div");
  const record = () => schemes.find(one => one.name === subject.scheme);
  const names = schemes.map(one => [one.name, one.name + (one.synchronous ? "" : " (asynchronous)")]);
  if (subject.file) names.unshift(["", subject.name]);
  const scheme = field("scheme", choice(names, subject.file ? "" : subject.scheme, name => {
    if (name) choose(subject, schemes.find(one => one.name === name), record());
    refresh();
    changed();
  }));
  function refresh() {
    own.replaceChildren();
    if (!record()) return;
    own.append(el("p", { class: "soft" }, `${record().summary} (${record().source})`));
    for (const option of record().options) own.append(optionField(subject, option, () => { subject.moves = []; changed(); }));
  }
  refresh();
  const file = el("input", { type: "file", accept: ".json,application/json", onchange: async () => {
    try {
      const text = await file.files[0].text();
      const found = await ask("/api/file", { name: file.files[0].name, text });
      state.subjects[index] = { file: found.file, name: file.files[0].name, options: {}, moves: [] };
      rebuild();
    } catch (error) { errors.say(error); }
  } });
  const moved = subject.moves.length ? el("p", {}, `${subject.moves.length} op${subject.moves.length > 1 ? "s" : ""} moved. `,
    el("button", { type: "button", onclick: () => { subject.moves = []; rebuild(); } }, "All back")) : null;
  return el("fieldset", {}, el("legend", {}, index ? "Second schedule" : "Schedule"), scheme, own, field("or a file", file), moved);
}

// Another scheme takes over what both have; how many workers there are the server translates.
function choose(subject, record, before) {
  const kept = {};
  for (const option of record.options) if (option.name in subject.options) kept[option.name] = subject.options[option.name];
  if (before && !(record.depth in kept) && before.depth in subject.options) kept[record.depth] = subject.options[before.depth];
  for (const option of record.options) if (option.required && !(option.name in kept)) kept[option.name] = option.name === "micro_batches" ? 8 : 4;
  delete subject.file;
  Object.assign(subject, { scheme: record.name, options: kept, moves: [] });
}

function optionField(subject, option, changed) {
  const title = `${option.help} (${option.legal})`, given = subject.options[option.name];
  const set = value => {
    if (value === "" || value === null) delete subject.options[option.name];
    else subject.options[option.name] = optionValue(option, value);
    changed();
  };
  if (option.kind === "flag") return tick(words(option.name), given ?? option.usual, set, title);
  if (option.kind === "word") return field(words(option.name), choice(option.words.map(word => [word]), given ?? option.usual, set), { title });
  const plain = !option.words.length;
  const input = el("input", { type: plain ? "number" : "text", value: given ?? "", placeholder: option.usual ?? "", required: option.required,
    oninput: () => set(input.value) });
  return field(words(option.name), input, { title });
}

const MOST = { forward: 4, backward: 8, input_gradient: 4, weight_gradient: 4, p2p: 2, sync: 4, agreement: 2 };
const USUAL = { forward: 1, backward: 2, input_gradient: "half", weight_gradient: "rest", p2p: 0, sync: 0, agreement: 0 };

export function costForm(state, changed) {
  const { costs } = state, set = (name, text) => { costs[name] = costValue(name, text); if (costs[name] === null) delete costs[name]; changed(); };
  const rows = COSTS.map(name => {
    const text = el("input", { value: costs[name] ?? "", placeholder: USUAL[name], inputmode: "decimal",
      oninput: () => { set(name, text.value); if (!Number.isNaN(Number(text.value))) slider.value = text.value; } });
    const slider = el("input", { type: "range", min: 0, max: MOST[name], step: "any", value: String(costs[name] ?? (typeof USUAL[name] === "number" ? USUAL[name] : 1)),
      "aria-label": `${words(name)}, slider`, oninput: () => { text.value = Number(Number(slider.value).toPrecision(3)); set(name, text.value); } });
    const title = ["p2p", "agreement"].includes(name) ? "seconds" : "seconds; one number, or one a stage: 1,1,2,1";
    return field(name === "p2p" ? "message" : words(name), text, { class: "cost", before: [slider], title });
  });
  const mode = (label, name, options) => field(label, choice([["", "usual"], ...options], costs[name] === undefined ? "" : String(costs[name]), value => set(name, value)));
  const wide = innerWidth > 860;
  return el("fieldset", {}, el("legend", {}, "Costs"), el("details", { open: wide }, el("summary", {}, "Seconds"),
    el("p", { class: "soft" }, "Seconds of one stage; one number, or one a stage: 1,1,2,1"), ...rows),
    el("details", {}, el("summary", {}, "Links, syncs, recomputation"),
      mode("links", "link", [["one-at-a-time"], ["infinite"]]),
      mode("messages", "overlap", [["true", "overlap compute"], ["false", "stop compute"]]),
      mode("sync mode", "sync_mode", [["eager-opt"], ["eager"], ["end"]]),
      mode("recompute", "recompute", [["none"], ["stage"], ["layer"]]),
      textField("replicas", costs.replicas, text => set("replicas", text), "1")),
    el("details", { open: BYTES.some(name => costs[name]) }, el("summary", {}, "Memory of a stage"),
      ...BYTES.map(name => textField(words(name), costs[name], text => set(name, text), name === "layers" ? "1" : "300MB"))),
    tick("draw messages", state.messages, value => { state.messages = value; changed(); }));
}

export function limitForm(state, changed) {
  return el("fieldset", {}, el("legend", {}, "Limits of a worker"),
    textField("activations", state.peak, text => { state.peak = text; changed(); }, "none"),
    textField("memory", state.memory, text => { state.memory = text; changed(); }, "16GiB"));
}

function textField(label, value, set, placeholder) {
  const input = el("input", { value: value ?? "", placeholder, oninput: () => set(input.value) });
  return field(label, input);
}
