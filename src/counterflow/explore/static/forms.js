// The forms of the page of schedules: of a schedule and of its costs, of limits.
import { ask, choice, el, field, tick } from "./page.js";
import { costForm } from "./costs.js";
import { optionValue } from "./choices.js";

const words = name => name.replaceAll("_", " ");

export function subjectForm(state, index, { schemes, costs }, { changed, rebuild, errors }) {
  const subject = state.subjects[index], own = el("div"), paid = el("fieldset");
  const record = () => schemes.find(one => one.name === subject.scheme);
  const names = schemes.map(one => [one.name, one.name + (one.synchronous ? "" : " (asynchronous)")]);
  if (subject.file) names.unshift(["", subject.name]);
  const scheme = field("scheme", choice(names, subject.file ? "" : subject.scheme, name => {
    if (!name) return;
    const planned = subject.planned;
    choose(subject, schemes.find(one => one.name === name), record());
    refresh();
    if (planned) pay();
    changed();
  }));
  // The choice of a scheme stays as it is, so that its name can be typed.
  function refresh() {
    own.replaceChildren();
    if (!record()) return;
    own.append(el("p", { class: "soft" }, `${record().summary} (${record().source})`));
    for (const option of record().options) own.append(optionField(subject, option, () => { subject.moves = []; changed(); }));
  }
  function pay() {
    const other = () => { subject.planned = false; pay(); changed(); };
    let recompute = subject.costs?.recompute;
    // With recomputations orders have more ops, of which moves name places.
    const repaid = () => {
      if (subject.costs.recompute !== recompute) subject.moves = [];
      recompute = subject.costs.recompute;
      changed();
    };
    paid.replaceChildren(el("legend", {}, index ? "Costs of the second" : "Costs"), ...(subject.planned
      ? [el("p", {}, "The plan's costs, of each stage and each link."), el("button", { type: "button", onclick: other }, "Give other costs")]
      : costForm(subject.costs, costs, ["stage", "worker", "model"], repaid, { open: !index })));
  }
  refresh();
  pay();
  const file = el("input", { type: "file", accept: ".json,application/json", onchange: async () => {
    try {
      const text = await file.files[0].text();
      const found = await ask("/api/file", { name: file.files[0].name, text });
      state.subjects[index] = { file: found.file, name: file.files[0].name, options: {}, moves: [], costs: subject.costs };
      rebuild();
    } catch (error) { errors.say(error); }
  } });
  const moved = subject.moves.length ? el("p", {}, `${subject.moves.length} op${subject.moves.length > 1 ? "s" : ""} moved. `,
    el("button", { type: "button", onclick: () => { subject.moves = []; rebuild(); } }, "All back")) : null;
  return [el("fieldset", {}, el("legend", {}, index ? "Second schedule" : "Schedule"), scheme, own, field("or a file", file), moved), paid];
}

// Another scheme takes over what both have; how many workers there are the server translates.
export function choose(subject, record, before) {
  const kept = {};
  for (const option of record.options) if (option.name in subject.options) kept[option.name] = subject.options[option.name];
  if (before && !(record.depth in kept) && before.depth in subject.options) kept[record.depth] = subject.options[before.depth];
  for (const option of record.options) if (option.required && !(option.name in kept)) kept[option.name] = option.name === "micro_batches" ? 8 : 4;
  delete subject.file;
  subject.planned = false;
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
  const input = el("input", { type: plain ? "number" : "text", name: option.name, value: given ?? "", placeholder: option.usual ?? "", required: option.required,
    oninput: () => set(input.value) });
  return field(words(option.name), input, { title });
}

export function limitForm(state, changed) {
  return el("fieldset", {}, el("legend", {}, "Limits of a worker"),
    limit(state, "peak", "activations", "none", changed), limit(state, "memory", "memory", "16GiB", changed),
    el("p", { class: "soft" }, "Activations are those of a stage, for one micro-batch."));
}

function limit(state, name, label, placeholder, changed) {
  const input = el("input", { name, "data-field": name === "memory" ? "memory_bytes" : name, value: state[name], placeholder, oninput: () => { state[name] = input.value; changed(); } });
  return field(label, input);
}
