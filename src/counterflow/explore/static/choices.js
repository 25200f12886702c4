// The choices of the page of schedules, to and from its address.
export const COSTS = ["forward", "backward", "input_gradient", "weight_gradient", "p2p", "sync", "agreement"];
export const MODES = ["link", "overlap", "sync_mode", "recompute", "replicas"];
export const BYTES = ["weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "input_bytes", "kept_for_weights", "layers"];
const NUMBERS = ["p2p", "agreement", "replicas"];

// The value of a form's text as the server takes it.
export function costValue(name, text) {
  if (text === "" || text === null) return null;
  if (name === "overlap") return text === "true";
  return NUMBERS.includes(name) && text.trim() !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
}
export function optionValue(option, text) {
  if (option.kind === "flag") return text === "true" || text === true;
  return /^[+-]?\d{1,15}$/.test(text) ? Number(text) : text;
}

export function subjectOf(subject) {
  const moves = subject.moves.map(([worker, start, stop]) => ({ worker, start, stop }));
  return subject.file ? { file: subject.file, moves } : { scheme: subject.scheme, options: subject.options, moves };
}

export function fromAddress(search, schemes) {
  const given = new URLSearchParams(search), subjects = [];
  for (const side of ["a", "b"]) {
    const moves = (given.get(`${side}.moves`) || "").split("_").filter(Boolean).map(text => text.split(".").map(Number));
    if (given.has(`${side}.file`)) subjects.push({ file: given.get(`${side}.file`), name: given.get(`${side}.name`) || "file", options: {}, moves });
    else if (given.has(`${side}.scheme`)) {
      const scheme = given.get(`${side}.scheme`), record = schemes.find(one => one.name === scheme), options = {};
      for (const [key, text] of given)
        if (key.startsWith(`${side}.`) && !["scheme", "moves", "name"].includes(key.slice(2)))
          options[key.slice(2)] = optionValue(record?.options.find(o => o.name === key.slice(2)) || {}, text);
      subjects.push({ scheme, options, moves });
    }
  }
  if (!subjects.length) subjects.push({ scheme: "chimera", options: { stages: 4, micro_batches: 8 }, moves: [] });
  const costs = {};
  for (const name of [...COSTS, ...MODES, ...BYTES]) if (given.has(name)) costs[name] = costValue(name, given.get(name));
  return { subjects, costs, peak: given.get("peak") || "", memory: given.get("memory") || "", messages: given.has("messages") };
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
  });
  for (const [name, value] of Object.entries(state.costs)) if (value !== null && value !== "") said.set(name, value);
  for (const name of ["peak", "memory"]) if (state[name]) said.set(name, state[name]);
  if (state.messages) said.set("messages", "1");
  return `${page}?${said}`;
}
