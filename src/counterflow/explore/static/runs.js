// Runs: which there are, and of those chosen the curves, the last step above its prediction, workers and events.
// A page that is seen asks again and again, so that what is written is seen within a second. All pages of a machine
// ask at the same moments, so that the server works out one answer for them.
import { Timeline } from "./timeline.js";
import { lines } from "./lines.js";
import { Errors, ask, el, facts, shownAgain, split, table, tick } from "./page.js";

const EVERY = 800, MOST = 2000;

export async function show(place) {
  const errors = new Errors(), list = el("div"), picture = el("div"), curves = el("div", { class: "sides" });
  const told = el("div"), known = new Map(), status = el("p", { class: "soft", role: "status" });
  let chosen = new URLSearchParams(location.search).getAll("run"), timeline = null, version = "", shown = "", seen = "", all = [];
  let automatic = !chosen.length;  // nobody has chosen: the run that goes on is shown, as soon as there is one
  const narrow = matchMedia("(max-width: 860px)"), results = el("div");
  const arrange = () => results.append(status, ...(narrow.matches ? [picture, curves] : [curves, picture]), told);
  narrow.addEventListener("change", arrange);
  arrange();
  place.append(el("h1", {}, "Runs"), errors.place, split("Choose runs", list, results));

  async function refresh() {
    try {
      if (chosen.length) await look().catch(listOnly); else await listOnly();
      errors.say(null);
      shownAgain();
    } catch (error) { errors.say(error); }
  }

  // At first, and where a run that is shown has been removed.
  async function listOnly() {
    const { runs, places } = await ask("/api/runs"), had = chosen;
    chosen = chosen.filter(name => runs.some(run => run.name === name));
    if (!chosen.length && runs.length) { automatic = true; chosen = [newest(runs)]; }
    if (chosen.length !== had.length) version = "";
    all = places;
    listed(runs);
    if (chosen.length) await look();
  }

  // The one that is running, or the newest that has something to show.
  const newest = runs => (runs.find(run => run.state === "running") ?? runs.find(run => run.steps) ?? runs[0]).name;

  function listed(runs) {
    if (automatic && runs.length && newest(runs) !== chosen[0]) { chosen = [newest(runs)]; version = ""; }
    const key = JSON.stringify([runs, chosen]);
    if (key === shown) return;
    shown = key;
    const focused = list.contains(document.activeElement) ? document.activeElement.id : null;
    list.replaceChildren(el("fieldset", {}, el("legend", {}, "Choose runs"),
      runs.length ? null : el("p", {}, `There is no run in ${all.join(", ")}. Begin one: counterflow train`),
      ...runs.map((run, i) => {
        const box = tick(`${run.name}, ${run.state}, step ${run.steps}${run.loss ? `, loss ${run.loss}` : ""}`, chosen.includes(run.name), on => {
          automatic = false;
          chosen = on ? [...chosen, run.name].slice(-8) : chosen.filter(name => name !== run.name);
          history.replaceState(null, "", `/runs?${new URLSearchParams(chosen.map(name => ["run", name]))}`);
          version = "";
          listed(runs);
          refresh();
        });
        box.querySelector("input").id = `run-${i}`;
        return box;
      })));
    if (focused) document.getElementById(focused)?.focus();
  }

  async function look() {
    const asked = chosen;
    const runs = asked.map(name => ({ name, metrics: known.get(name)?.metrics || "" }));
    const found = await ask("/api/run", { runs, timeline: version, listed: seen });
    if (asked !== chosen || runs.some(run => run.metrics !== (known.get(run.name)?.metrics || ""))) return;  // another answer came first
    seen = found.listed;
    if (found.list) listed(found.list);
    let fresh = false;
    for (const run of found.runs) {
      const had = known.get(run.name)?.curves;
      if (!run.curves) run.curves = had;
      else { fresh = true; if (run.added) run.curves = longer(had, run.curves); }
      known.set(run.name, run);
    }
    const key = found.runs.map(run => `${run.name} ${run.state}`).join("\n");
    if (fresh || curves.dataset.of !== key) {
      curves.dataset.of = key;
      const curve = kind => found.runs.map(run => ({ name: run.name, steps: run.curves[kind][0], values: run.curves[kind][1] }));
      const none = found.runs.some(run => run.state === "running") ? "nothing yet" : "none was recorded";
      curves.replaceChildren(lines("Training loss", curve("loss"), none), lines("Validation loss", curve("validation_loss"), none),
        lines("Samples a second", curve("samples_per_second"), none));
    }
    if (found.timeline) { version = found.version; drawn(found.timeline); }
    said(found.runs);
  }

  let measured = [];
  function drawn(found) {
    if (found.picture) {
      if (timeline) timeline.update(found.picture); else timeline = new Timeline(picture, found.picture, { level: "h2" });
      picture.hidden = false;
    } else picture.hidden = true;
    measured = [];
    for (const problem of found.problems) measured.push(el("p", { class: "soft" }, problem));
    if (found.parts) measured.push(
      el("h2", {}, found.title), facts(found.figures),
      table("Where the difference is, the mean of all workers", [["mean of all workers", 0, true], ["measured", 1], ["predicted", 2], ["difference", 3]], found.parts),
      el("h3", {}, "Workers"), found.remark ? el("p", {}, found.remark) : "",
      table("Workers", [["worker", "worker"], ["computing", "busy"], ["predicted", "predicted"],
        ["times the prediction", row => row.slow ? el("strong", { class: "wrong" }, `${row.times}, slow`) : row.times],
        ["saved for backward", "saved"], ["predicted", "saved_predicted"]], found.rows));
  }

  let before = "";
  function said(runs) {
    const states = runs.map(run => `${run.name}: ${run.state}, step ${run.curves.loss[0].at(-1) ?? 0}${run.about.steps ? ` of ${run.about.steps}` : ""}`).join("; ");
    if (status.textContent !== states) status.textContent = states;
    const key = JSON.stringify([version, runs.map(run => [run.name, run.events])]);
    if (key === before) return;
    before = key;
    told.replaceChildren(...measured, ...runs.map(run => el("section", {}, el("h3", {}, `Events of ${run.name}`),
      run.events.length ? el("ul", { class: "plain" }, ...run.events.map(event => el("li", { class: event.kind === "wrong" ? "wrong" : null },
        `${event.time ? `${new Date(event.time).toLocaleTimeString()}  ` : ""}${event.text}`))) : el("p", { class: "soft" }, "none"))));
  }

  let timer = 0;
  async function again() {
    clearTimeout(timer);
    if (document.hidden) return;
    await refresh();
    clearTimeout(timer);
    timer = setTimeout(again, EVERY - Date.now() % EVERY);
  }
  document.addEventListener("visibilitychange", again);
  await again();
}

// Curves with what was added; of one that has become long, every other point and the last.
function longer(had, added) {
  return Object.fromEntries(Object.entries(added).map(([name, [steps, values]]) => {
    const curve = [[...had[name][0], ...steps], [...had[name][1], ...values]], last = curve[0].length - 1;
    return [name, last < MOST ? curve : curve.map(column => column.filter((_, i) => i % 2 === 0 || i === last))];
  }));
}
