// Plans: an example or the user's files, links and memory changed, and the best plan of every scheme with its picture.
// The page begins with a plan. Each opens in Schedules with its costs, and is saved as a config for counterflow train.
import { Timeline } from "./timeline.js";
import { Errors, ask, choice, download, el, field, percent, shares, shownAgain, split, table, tick } from "./page.js";
import { search } from "./jobs.js";
import { toAddress } from "./choices.js";

const FILES = ["model", "profile", "cluster"];

export async function show(place) {
  const { examples } = await ask("/api/examples"), given = new URLSearchParams(location.search);
  const state = { example: given.get("example") ?? examples[0].name, mini_batch: given.get("mini_batch") || "", stale: given.has("stale"),
    link_speed: given.get("link_speed") || "1", memory: given.get("memory") || "1", files: {} };
  const side = el("form", { "aria-label": "What is planned", onsubmit: event => { event.preventDefault(); run(); } });
  const errors = new Errors(side), found = el("div"), about = el("p", { class: "soft" });

  const said = () => { about.textContent = examples.find(one => one.name === state.example)?.about ?? "From your own files."; };
  function changed() {
    const kept = new URLSearchParams({ example: state.example, link_speed: state.link_speed, memory: state.memory });
    if (state.mini_batch) kept.set("mini_batch", state.mini_batch);
    if (state.stale) kept.set("stale", "1");
    history.replaceState(null, "", `/plans?${kept}`);
    said();
  }
  const number = (label, name, placeholder) => {
    const input = el("input", { type: "number", name, min: 1, value: state[name], placeholder, oninput: () => { state[name] = input.value; changed(); } });
    return field(label, input);
  };
  // A factor from 1/16 to 16, even on a scale of doublings.
  const factor = (label, name) => {
    const text = el("input", { name, value: state[name], inputmode: "decimal", oninput: () => { state[name] = text.value; slider.value = Math.log2(Number(text.value)) || 0; changed(); } });
    const slider = el("input", { type: "range", min: -4, max: 4, step: 0.25, value: Math.log2(Number(state[name])) || 0, "aria-label": `${label}, slider`,
      oninput: () => { text.value = String(Number((2 ** slider.value).toPrecision(3))); state[name] = text.value; changed(); } });
    return field(label, text, { class: "cost", before: [slider] });
  };
  const file = name => {
    const input = el("input", { type: "file", accept: ".toml,.json", onchange: async () => {
      state.files[name] = { name: input.files[0].name, text: await input.files[0].text() };
    } });
    return field(name, input);
  };
  const begin = () => ask("/api/plan", { example: state.example || null, mini_batch: state.mini_batch ? Number(state.mini_batch) : null, stale: state.stale,
    link_speed: Number(state.link_speed), memory: Number(state.memory), ...state.files });
  const { buttons, progress, run } = search("Plan", begin, async (answer, job) => shown(answer, job), errors);
  side.append(
    el("fieldset", {}, el("legend", {}, "Model and cluster"),
      field("example", choice([...examples.map(one => [one.name]), ["", "none: my own files"]], state.example, value => { state.example = value; changed(); })), about,
      number("mini-batch", "mini_batch", "as given"),
      el("details", {}, el("summary", {}, "Own files"), el("p", { class: "soft" }, "In place of the example's; counterflow plan --save-inputs writes some to begin with."), ...FILES.map(file)),
      tick("also asynchronous schemes", state.stale, value => { state.stale = value; changed(); })),
    el("fieldset", {}, el("legend", {}, "What if"), el("p", { class: "soft" }, "scale factors: 2 is twice as fast, or twice as large"),
      factor("links", "link_speed"), factor("memory", "memory")),
    buttons);
  place.append(el("h1", {}, "Plans"), errors.place, split("Model, cluster, what if", side, progress, found));
  said();
  if (state.example) run();

  function shown(answer, job) {
    const one = el("div"), place = plan => ({ job, plan: answer.plans.indexOf(plan) });
    async function open(plan) {
      try {
        const { file, name } = await ask("/api/plan/open", place(plan));
        location.href = toAddress({ subjects: [{ file, name, planned: true, moves: [] }] }, "/schedules");
      } catch (error) { errors.say(error); }
    }
    const save = plan => download("/api/plan/save", place(plan)).then(() => errors.say(null), error => errors.say(error));
    const pictured = plan => picture(plan, one, [
      el("button", { type: "button", class: "main", onclick: () => open(plan) }, "Open in Schedules"),
      el("button", { type: "button", onclick: () => save(plan) }, "Save plan.toml")]);
    const row = (plan, i) => el("button", { type: "button", onclick: () => pictured(plan), "aria-label": `Picture of ${plan.schedule}` }, i + 1);
    const columns = [["", (plan) => row(plan, answer.plans.indexOf(plan))], ["scheme", plan => el("button", { type: "button", title: "Open in Schedules", onclick: () => open(plan) }, plan.scheme), true],
      ["step", "step"], ["samples/s", "throughput"], ["bubbles", "bubbles"], ["peak memory", "memory"], ["limited by", limit, true],
      ["D", "workers"], ["W", "replicas"], ["B", "samples"], ["N", "micro_batches"], ["recompute", "recompute", true], ["options", "choices", true]];
    found.replaceChildren(el("h2", {}, answer.heading), el("p", { class: "soft" }, answer.about),
      table("The best plan of every scheme", columns, answer.plans),
      ...answer.changes.map(text => el("p", {}, text)), answer.more_memory ? el("p", {}, answer.more_memory) : "",
      one,
      el("details", {}, el("summary", {}, "Search statistics"), table("Candidates", [["scheme", 0, true], ["candidates", 1], ["too large", 2], ["slower by bound", 3], ["simulated", 4]], answer.rejected),
        ...answer.omitted.map(text => el("p", { class: "soft" }, text))));
    pictured(answer.plans[0]);
    shownAgain();
  }
}

function limit(plan) {
  const beyond = plan.parts.filter(([name]) => name !== "compute").sort((a, b) => b[1] - a[1])[0];
  return beyond[1] > 1e-6 ? `${beyond[0]} ${percent(beyond[1])}` : "compute";
}

function picture(plan, place, buttons) {
  const drawn = el("div");
  place.replaceChildren(el("h3", {}, `${plan.schedule}, ${plan.replicas} replica${plan.replicas === 1 ? "" : "s"}, micro-batches of ${plan.samples}, sync ${plan.sync}`),
    el("div", { class: "bar" }, ...buttons), el("p", { class: "soft" }, "Where its step goes"), shares("a step", plan.parts.map(([name, share, text]) => [name, share, text])),
    ...plan.notes.map(note => el("p", { class: "soft" }, note)), drawn);
  if (plan.picture) new Timeline(drawn, plan.picture, { level: "h3" });
  else drawn.append(el("p", { class: "soft" }, "Too many ops for a picture here; counterflow show draws them."));
}
