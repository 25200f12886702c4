// The computed order of what the first schedule computes, with its costs and the limits of the form.
import { ask, choice, el, facts, field } from "./page.js";
import { search } from "./jobs.js";

export function orderForm(state, request, taken, errors) {
  state.order ||= { objective: "makespan", split: "", seconds: "10", found: null };
  const wanted = state.order, result = el("div");
  const seconds = el("input", { type: "number", name: "seconds", min: 0, max: 600, value: wanted.seconds, oninput: () => { wanted.seconds = seconds.value; } });
  const begin = () => {
    const { subjects, peak, memory } = request();
    return ask("/api/order", { subject: subjects[0], peak, memory, objective: wanted.objective,
      split: wanted.split === "" ? null : wanted.split === "yes", seconds: Number(wanted.seconds) });
  };
  const found = async answer => {
    const { file, planned = false, costs } = state.subjects[0];
    const given = await ask("/api/file", { name: "computed order", text: answer.schedule, like: planned ? file : null });
    wanted.found = answer;
    taken({ file: given.file, name: "computed order", planned, costs: { ...costs }, options: {}, moves: [] });
  };
  if (wanted.found) {
    const { said, command, reason, stopped } = wanted.found;
    result.append(el("p", {}, el("strong", {}, said), "."),
      el("details", {}, el("summary", {}, "Bound, and how to get it"), facts(wanted.found.facts),
        el("p", { class: "soft" }, reason + (stopped ? "; stopped before its end" : "")),
        el("p", {}, command ? "In a terminal:" : "Download its schedule file above."), command ? el("pre", {}, command) : null));
  }
  const { buttons, progress } = search("Compute the order", begin, found, errors);
  buttons.append(
    field("objective", choice([["makespan"], ["steady", "steady step"]], wanted.objective, value => { wanted.objective = value; })),
    field("backwards", choice([["", "as they are"], ["yes", "split"], ["no", "whole"]], wanted.split, value => { wanted.split = value; })),
    field("seconds", seconds));
  return el("fieldset", { class: "order", title: "For the first schedule's placement, micro-batches and costs, within the limits; shown as the second schedule" },
    el("legend", {}, "Computed order"), buttons, progress, result);
}
