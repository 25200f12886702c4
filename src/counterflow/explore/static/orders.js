// "Compute the best order": for what the first schedule computes, with its costs and the limits of the form.
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
  if (wanted.found) result.append(facts(wanted.found.facts), el("p", { class: "soft" }, wanted.found.reason + (wanted.found.stopped ? "; stopped before its end" : "")));
  const { buttons, progress } = search("Compute the best order", begin, found, errors);
  return el("fieldset", {}, el("legend", {}, "Best order"),
    el("p", { class: "soft" }, "Computed for the first schedule's placement, micro-batches and costs within these limits, and shown as the second schedule."),
    field("objective", choice([["makespan"], ["steady", "steady step"]], wanted.objective, value => { wanted.objective = value; })),
    field("backwards", choice([["", "as they are"], ["yes", "split"], ["no", "whole"]], wanted.split, value => { wanted.split = value; })),
    field("seconds", seconds), buttons, progress, result);
}
