// What every page uses: elements, questions to the server, tables, downloads.

// An element with attributes, listeners (`onclick`) and children; what is null is left out.
export function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "path", "line", "text", "g", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (["value", "checked", "disabled", "selected", "className"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

// The token of the address, where it has one, kept for this tab and taken out of sight.
export function keepToken() {
  const address = new URL(location);
  if (!address.searchParams.has("token")) return;
  sessionStorage.setItem("token", address.searchParams.get("token"));
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

async function sent(path, body, keepalive = false) {
  const headers = { "X-Counterflow": sessionStorage.getItem("token") || "page", "Content-Type": "application/json" };
  const request = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body), keepalive };
  let answer;
  try {
    answer = await fetch(path, request);
  } catch {
    throw new Error("The server does not answer: is counterflow explore still running?");
  }
  if (answer.ok) return answer;
  let told;
  try { told = (await answer.json()).error; } catch { told = `the server answered ${answer.status}`; }
  throw new Error(told);
}

export async function ask(path, body, keepalive) { return (await sent(path, body, keepalive)).json(); }

export async function download(path, body) {
  const answer = await sent(path, body);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition"))[1];
  const link = el("a", { href: URL.createObjectURL(await answer.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A place for errors, read out when they come; the box that one names is marked, in `form` if it has several.
export class Errors {
  constructor(form = document) { this.form = form; this.place = el("div", { role: "alert", class: "errors" }); }
  say(error) {
    for (const box of this.form.querySelectorAll("[aria-invalid]")) box.removeAttribute("aria-invalid");
    let said = error?.message ?? "";
    const [, second = "", place, more] = /^(second schedule: )?([\w.]+)([=:].*)$/s.exec(said) ?? [];
    // By what it is asked for by, or by the record's field.
    const name = place?.split(".").at(-1), named = attribute => [...this.form.querySelectorAll(`input[${attribute}="${name}"]`)].at(second ? -1 : 0);
    const box = name && (named("name") ?? named("data-field"));
    if (box) {
      box.setAttribute("aria-invalid", "true");
      said = `${second}${box.labels[0].textContent}${more}`;
    }
    this.place.replaceChildren(...(error ? [el("div", { class: "error" }, said)] : []));
  }
}

// A form beside what comes of it. In a narrow window the form is closed, so that the result is seen first.
export function split(text, form, ...results) {
  const wide = matchMedia("(min-width: 861px)"), side = el("details", { class: "side" }, el("summary", {}, text), form);
  const fit = () => { side.open = wide.matches; };
  wide.addEventListener("change", fit);
  fit();
  return el("div", { class: "split-page" }, side, el("div", {}, ...results));
}

// Soon, once the page is seen: a hidden one asks nothing.
export async function seen(after) {
  await new Promise(resolve => setTimeout(resolve, after));
  if (document.hidden) await new Promise(resolve => document.addEventListener("visibilitychange", resolve, { once: true }));
}

// What the page shows has changed; for who waits for it.
export function shownAgain() {
  const { dataset } = document.documentElement;
  dataset.shown = String(Number(dataset.shown || 0) + 1);
}

// A table in a box that scrolls; `columns` are [title, key or function, is text].
export function table(caption, columns, rows) {
  const cell = (row, [, get, text]) => {
    const value = typeof get === "function" ? get(row) : row[get];
    return el("td", { class: text ? "text" : null }, value ?? "");
  };
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { class: "data" },
      el("caption", { class: "unseen" }, caption),
      el("thead", {}, el("tr", {}, ...columns.map(([title, , text]) => el("th", { scope: "col", class: text ? "text" : null }, title)))),
      el("tbody", {}, ...rows.map(row => el("tr", {}, ...columns.map(column => cell(row, column)))))));
}

export function facts(pairs) {
  return el("dl", { class: "facts" }, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// Parts of a whole as a bar with its legend; `parts` are [name, share, text].
const HUES = ["#6783ed", "#fcbc48", "#fb86b2", "#62dfda", "#9f6bcc", "#798d62", "#d85c46"];
export function shares(title, parts) {
  let at = 0;
  const known = parts.map(([name, share, text], i) => ({ name, share, text, hue: HUES[i % HUES.length] })).filter(p => p.share > 0);
  const bar = el("svg", { class: "shares", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: ${known.map(p => `${p.name} ${p.text}`).join(", ") || "none"}` },
    ...known.map(p => { const x = at; at += 100 * p.share; return el("rect", { x, y: 0, width: 100 * p.share, height: 10, fill: p.hue }); }));
  const legend = el("ul", { class: "keys" }, ...known.map(p => el("li", {},
    el("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, el("rect", { width: 10, height: 10, fill: p.hue })), `${p.name} ${p.text}`)));
  return el("div", {}, bar, legend);
}

export const percent = share => `${Number((100 * share).toPrecision(3))} %`;

let ids = 0;
// A labelled field in a row.
export function field(label, input, more = {}) {
  input.id ||= `field-${++ids}`;
  return el("div", { class: `row ${more.class || ""}`, title: more.title }, el("label", { for: input.id }, label), ...(more.before || []), input);
}
export function tick(label, checked, onchange, title) {
  const input = el("input", { type: "checkbox", checked, onchange: () => onchange(input.checked) });
  return el("label", { class: "check", title }, input, label);
}
export function choice(options, value, onchange, more = {}) {
  const select = el("select", { ...more, onchange: () => onchange(select.value) },
    ...options.map(([name, text]) => el("option", { value: name, selected: name === value }, text ?? name)));
  return select;
}
