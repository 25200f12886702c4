// Schedules: choose one or two, change costs and orders, see what comes of it. The address holds all choices.
import { Timeline } from "./timeline.js";
import { Errors, ask, download, el, facts, percent, shares, shownAgain, split, table, tick } from "./page.js";
import { fromAddress, scheduleOf, subjectOf, toAddress } from "./choices.js";
import { choose, limitForm, subjectForm } from "./forms.js";
import { orderForm } from "./orders.js";

const NOTED_EVERY = 200; // milliseconds
const FORMS = [["schedule", "Schedule file"], ["csv", "CSV of all ops"], ["png", "PNG"], ["svg", "SVG"], ["pdf", "PDF"],
  ["html", "Offline page"], ["trace", "Perfetto trace"]];

export async function show(place) {
  const records = await ask("/api/schemes"), state = fromAddress(location.search, records);
  const side = el("form", { "aria-label": "What is shown", onsubmit: e => e.preventDefault() }), errors = new Errors(side);
  const picture = el("div"), told = el("div", { class: "sides" }), bar = el("div", { class: "bar" }), order = el("div");
  const status = el("div", { class: "unseen", role: "status" }), note = el("div");
  // A phone shows the timeline first.
  const pictures = matchMedia("(max-width: 860px)").matches ? [note, picture, order] : [order, note, picture];
  place.append(el("h1", {}, "Schedules"), errors.place, split("Schedule, costs, limits", side, bar, ...pictures, help(), told, status));
  let timeline = null, asking = false, stale = false, checks = 0, proved = [], noting = 0;

  const request = () => ({ subjects: state.subjects.map(subjectOf), peak: state.peak || null,
    memory: state.memory || null, messages: state.messages });

  // Plain 1F1B, everybody's baseline; beside it zb-v.
  function another(first) {
    const second = { ...structuredClone(first), moves: [] }, { schemes } = records;
    const record = schemes.find(one => one.name === (first.scheme === "dapple" ? "zb-v" : "dapple"));
    if (record) choose(second, record, schemes.find(one => one.name === first.scheme));
    return second;
  }

  function build() {
    const kept = memoryOf(side);
    side.replaceChildren(
      ...state.subjects.flatMap((_, index) => subjectForm(state, index, records, { changed, rebuild: changedAll, errors })),
      el("div", { class: "bar" }, state.subjects.length === 1
        ? el("button", { type: "button", onclick: () => { state.subjects.push(another(state.subjects[0])); changedAll(); } }, "Compare with another")
        : el("button", { type: "button", onclick: () => { state.subjects.pop(); changedAll(); } }, "Without the second")),
      limitForm(state, changed),
      el("fieldset", {}, el("legend", {}, "Picture"), tick("draw messages", state.messages, value => { state.messages = value; changed(); })));
    order.replaceChildren(orderForm(state, request, found => { state.subjects[1] = found; changedAll(); }, errors));
    kept();
    const form = el("select", { "aria-label": "Form of the download" }, ...FORMS.map(([name, text]) => el("option", { value: name }, text)));
    bar.replaceChildren(
      el("button", { type: "button", id: "undo", onclick: undo }, "Undo move"), form,
      el("button", { type: "button", onclick: () => download("/api/download", { ...request(), form: form.value }).catch(e => errors.say(e)) }, "Download"));
  }

  function undo() {
    const subject = state.subjects.findLast(one => one.moves.length);
    if (subject) { subject.moves.pop(); changedAll(); }
  }
  function changedAll() { build(); noted(); return look(); }
  function changed() {
    // Browsers refuse an address that changes with every step of a slider.
    noting ||= setTimeout(noted, NOTED_EVERY);
    return look();
  }
  function noted() {
    noting = clearTimeout(noting) ?? 0;
    history.replaceState(null, "", toAddress(state));
    document.getElementById("undo").disabled = !state.subjects.some(one => one.moves.length);
  }

  // Ask at once; what changes while an answer is in flight is asked for when it is here.
  async function look() {
    stale = asking;
    if (asking) return;
    asking = true;
    try {
      const asked = structuredClone(state.subjects), wanted = request(), found = await ask("/api/look", wanted);
      errors.say(null);
      if (timeline) timeline.update(found.picture);
      else timeline = new Timeline(picture, found.picture, { level: "h2", onMove: move });
      const kept = memoryOf(told);
      told.replaceChildren(...found.subjects.map((one, index) => said(one, index, { subject: scheduleOf(asked[index]), peak: wanted.peak })));
      kept();
      noteOf(found.note);
      status.textContent = found.picture.charts.map(c => `${c.heading}: ${c.summary}`).join("; ");
      shownAgain();
    } catch (error) {
      errors.say(error);
    } finally {
      asking = false;
    }
    if (stale) await look();
  }

  // Costs of a stage beside a model that is cut into others; one click makes them those of a worker's share.
  function noteOf(text) {
    if (note.dataset.text === text) return;
    note.dataset.text = text;
    const same = () => {
      for (const subject of state.subjects) if (!subject.planned && !subject.costs.costs_of) subject.costs.costs_of = "worker";
      changedAll();
    };
    const ofStages = state.subjects.some(one => !one.planned && !one.costs.costs_of);
    note.replaceChildren(...(text ? [el("p", { class: "note" }, text, " ",
      ofStages ? el("button", { type: "button", onclick: same }, "Give costs of a worker's share") : null)] : []));
  }

  function move(index, worker, start, stop) {
    state.subjects[index].moves.push([worker, start, stop]);
    changedAll();
  }

  // What there is to say of a schedule beside its picture.
  function said(one, index, asked) {
    const verdict = el("div", { "aria-live": "polite" }), key = JSON.stringify(asked);
    const known = proved[index]?.key === key;
    const fails = el("pre", { class: "wrong", hidden: true }, one.fails);  // the checker says it, unless it finds nothing
    const prove = async () => {
      verdict.replaceChildren(el("p", { class: "soft" }, "checking …"));
      if (proved[index]?.key !== key) proved[index] = { key, report: ask("/api/check", asked) };
      try {
        const report = await proved[index].report;
        verdict.replaceChildren(rules(report));
        fails.hidden = !report.ok;
        document.documentElement.dataset.checked = String(++checks);
      } catch (error) {
        proved[index] = null;
        fails.hidden = false;
        verdict.replaceChildren(el("p", { class: "wrong" }, error.message));
      }
    };
    if (one.own && !known) verdict.append(el("p", { class: "soft" }, "As its scheme makes it. "), el("button", { type: "button", onclick: prove }, "Check it"));
    else prove();
    const columns = [["worker", "worker"], ["busy", "busy"], ["idle", "idle"], ["bubbles", "bubbles"],
      ["peak activations", "activations"], ...(one.rows?.[0].of_share ? [["in a worker's shares", "of_share"]] : []), ["weight copies", "copies"]];
    if (one.rows?.some(row => row.memory))
      columns.push(["peak memory", row => row.over ? el("strong", { class: "wrong" }, `${row.memory}, too much`) : row.memory]);
    return el("section", { "aria-label": one.heading },
      el("h2", {}, one.heading),
      one.fails ? fails : facts(one.figures),
      one.fails ? null : el("h3", {}, "Bubbles by cause, of all workers' time"),
      one.fails ? null : shares("bubbles", one.causes.map(([name, share]) => [name, share, percent(share)])),
      el("h3", {}, "The checker"), verdict,
      one.fails ? null : el("h3", {}, "Workers"), one.fails ? null : table(`Workers of ${one.heading}`, columns, one.rows));
  }

  document.addEventListener("keydown", event => {
    if ((event.ctrlKey || event.metaKey) && event.key === "z" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) { event.preventDefault(); undo(); }
  });
  await changedAll();
}

function rules(report) {
  const bad = report.rules.filter(rule => rule.ok === false), unseen = report.rules.filter(rule => rule.ok === null);
  const list = el("details", {}, el("summary", {}, `All ${report.rules.length} rules`),
    el("ul", { class: "plain" }, ...report.rules.map(rule => el("li", {}, `${rule.ok ? "✓" : rule.ok === false ? "✗" : "–"} ${rule.rule}`))));
  if (report.ok) return el("div", {}, el("p", { class: "good" }, "✓ Correct: every rule holds."), list);
  return el("div", {}, ...bad.map(rule => el("div", {}, el("p", { class: "wrong" }, `✗ Breaks the rule “${rule.rule}”`), el("pre", {}, rule.detail))),
    unseen.length ? el("p", { class: "soft" }, `Not looked at, because of that: ${unseen.map(rule => rule.rule).join(", ")}`) : null, list);
}

// What was open and where the focus was in a part of the page that is built anew; to be called once it is.
function memoryOf(form) {
  const name = element => [[...form.children].indexOf(element.closest("fieldset, .bar")), element.tagName,
    element.labels?.[0]?.textContent || element.getAttribute("aria-label") || element.textContent].join("|");
  const focused = form.contains(document.activeElement) ? name(document.activeElement) : null;
  const open = [...form.querySelectorAll("summary")].map(summary => [name(summary), summary.parentElement.open]);
  return () => {
    for (const summary of form.querySelectorAll("summary")) {
      const before = open.find(([key]) => key === name(summary));
      if (before) summary.parentElement.open = before[1];
    }
    if (focused) [...form.querySelectorAll("input, select, button, summary")].find(one => name(one) === focused)?.focus();
  };
}

function help() {
  const key = text => el("kbd", {}, text);
  return el("details", {}, el("summary", {}, "Mouse and keys in the picture"), el("ul", { class: "plain soft" },
    el("li", {}, "Drag an op to another place in its worker's order, or choose it and press ", key("["), " or ", key("]"), "; undo with ", key("Ctrl"), " ", key("Z"), "."),
    el("li", {}, key("n"), " ", key("p"), " next and previous op, ", key("↑"), " ", key("↓"), " other worker. Green outlines: what it needs; amber: what needs it."),
    el("li", {}, "Wheel or ", key("+"), " ", key("−"), " zoom along time; drag the paper, ", key("Shift"), " wheel or ", key("←"), " ", key("→"), " move; double-click or ", key("0"), " shows all.")));
}
