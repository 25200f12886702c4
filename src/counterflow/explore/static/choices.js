// The choices of the page of schedules, to and from its address. What a cost is, the server says (`costs`).

// The value of a form's text as the server takes it.
export function costValue(cost, text) {
  if (text === "" || text === null) return null;
  if (cost?.kind === "flag") return text === "true";
  return cost?.kind === "number" && text.trim() !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
}
export function optionValue(option, text) {
  if (option.kind === "flag") return text === "true" || text === true;
  return /^[+-]?\d{1,15}$/.test(text) ? Number(text) : text;
}

// The costs that an address gives, under a prefix.
export function costsFrom(given, costs, prefix = "") {
  const found = {};
  for (const cost of [...costs, { name: "costs_of" }])
    if (given.has(prefix + cost.name)) found[cost.name] = costValue(cost, given.get(prefix + cost.name));
  return found;
}

// A schedule as the server takes it, with its costs; of a plan that has its own, none are sent.
export function scheduleOf(subject) {
  const moves = subject.moves.map(([worker, start, stop]) => ({ worker, start, stop }));
  return subject.file ? { file: subject.file, moves } : { scheme: subject.scheme, options: subject.options, moves };
}
export const subjectOf = subject => ({ ...scheduleOf(subject), costs: subject.planned ? null : subject.costs });

// Costs of the second schedule have its letter before them.
const costPrefix = side => side === "a" ? "" : "b.";

export function fromAddress(search, { schemes, costs }) {
  const given = new URLSearchParams(search), subjects = [];
  for (const side of ["a", "b"]) {
    const moves = (given.get(`${side}.moves`) || "").split("_").filter(Boolean).map(text => text.split(".").map(Number));
    const own = { moves, costs: costsFrom(given, costs, costPrefix(side)), planned: given.get(`${side}.costs`) === "plan" };
    if (given.has(`${side}.file`)) subjects.push({ ...own, file: given.get(`${side}.file`), name: given.get(`${side}.name`) || "file", options: {} });
    else if (given.has(`${side}.scheme`)) {
      const scheme = given.get(`${side}.scheme`), record = schemes.find(one => one.name === scheme), options = {};
      const others = ["scheme", "moves", "name", "costs", ...Object.keys(own.costs)];
      for (const [key, text] of given)
        if (key.startsWith(`${side}.`) && !others.includes(key.slice(2)))
          options[key.slice(2)] = optionValue(record?.options.find(o => o.name === key.slice(2)) || {}, text);
      subjects.push({ ...own, scheme, options, planned: false });
    }
  }
  if (!subjects.length) subjects.push({ scheme: "chimera", options: { stages: 4, micro_batches: 8 }, moves: [], costs: costsFrom(given, costs) });
  return { subjects, peak: given.get("peak") || "", memory: given.get("memory") || "", messages: given.has("messages") };
}

export function toAddress(state, page = location.pathname) {
  const said = new URLSearchParams();
  state.subjects.forEach((subject, index) => {
    const side = "ab"[index];
    if (subject.file) { said.set(`${side}.file`, subject.file); said.set(`${side}.name`, subject.name); }
    else {
      said.set(`${side}.scheme`, subject.scheme);
      for (const [name, value] of Object.entries(subject.options)) said.set(`${side}.${name}`, value);
    }
    if (subject.moves.length) said.set(`${side}.moves`, subject.moves.map(move => move.join(".")).join("_"));
    if (subject.planned) said.set(`${side}.costs`, "plan");
    else for (const [name, value] of Object.entries(subject.costs)) said.set(costPrefix(side) + name, value);
  });
  for (const name of ["peak", "memory"]) if (state[name]) said.set(name, state[name]);
  if (state.messages) said.set("messages", "1");
  return `${page}?${said}`;
}
