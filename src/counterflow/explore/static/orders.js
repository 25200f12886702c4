// "Compute the best order": for what the first schedule computes, with the costs and limits of the forms.
import { ask, choice, el, facts, field } from "./page.js";
import { search } from "./jobs.js";

export function orderForm(state, request, taken, errors) {
  state.order ||= { objective: "makespan", split: "", seconds: "10", found: null };
  const wanted = state.order, result = el("div");
  const seconds = el("input", { type: "number", min: 0, max: 600, value: wanted.seconds, oninput: () => { wanted.seconds = seconds.value; } });
  const began = Date.now;
  let start = 0;
  const begin = () => {
    start = began();
    const { subjects, costs, peak, memory } = request();
    return ask("/api/order", { subject: subjects[0], costs, peak, memory, objective: wanted.objective,
      split: wanted.split === "" ? null : wanted.split === "yes", seconds: Number(wanted.seconds) });
  };
  const told = now => [`best ${now.best}, bound ${now.bound}: ${now.doing}`, Math.min(0.99, (began() - start) / 1000 / (Number(wanted.seconds) || 1))];
  const found = async answer => {
    const given = await ask("/api/file", { name: "computed order", text: answer.schedule });
    wanted.found = answer;
    taken({ ...given, name: "computed order" });
  };
  if (wanted.found) result.append(facts(wanted.found.facts), el("p", { class: "soft" }, wanted.found.reason + (wanted.found.stopped ? "; stopped before its end" : "")));
  return el("fieldset", {}, el("legend", {}, "Best order"),
    el("p", { class: "soft" }, "For the first schedule's placement and micro-batches, with these costs and limits; shown as the second."),
    field("made small", choice([["makespan"], ["steady", "steady step"]], wanted.objective, value => { wanted.objective = value; })),
    field("backwards", choice([["", "as they are"], ["yes", "split"], ["no", "whole"]], wanted.split, value => { wanted.split = value; })),
    field("seconds", seconds), search("Compute the best order", begin, told, found, errors), result);
}
