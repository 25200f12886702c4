// Curves over steps, as SVG: several runs in one picture, each with a hue and a dash of its own.
import { el } from "./page.js";

const DASHES = ["", "7 4", "2 3", "9 3 2 3", "", "7 4", "2 3", "9 3 2 3"];
const WIDTH = 560, HEIGHT = 220, LEFT = 58, BOTTOM = 26, TOP = 10, RIGHT = 12;
// The next of …, 0.5, 1, 2, 5, 10, 20, …
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value) + 1e-9);
  return [1, 2, 5, 10].map(one => one * power).find(one => one >= value * (1 - 1e-9));
}
const short = value => String(Number(value.toPrecision(4)));

// Round numbers in equal steps, from the last below the values to the first above them.
export function ticks(low, high) {
  if (high - low < 1e-9 * Math.abs(high) || high === low) { const by = Math.abs(low) * 0.05 || 1; low -= by; high += by; }
  const step = round((high - low) / 4), first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

// `curves` are { name, steps, values }; those without a point are left out; `none` is said where all are.
export function lines(title, curves, none) {
  const known = curves.map((curve, i) => ({ ...curve, i })).filter(curve => curve.steps.length);
  const last = known.map(c => `${c.name}: ${short(c.values.at(-1))} at step ${c.steps.at(-1)}`).join("; ");
  const box = el("figure", {}, el("figcaption", {}, el("h3", {}, title)));
  if (!known.length) { box.append(el("p", { class: "soft" }, none)); return box; }
  const all = known.flatMap(c => c.values);
  const marks = ticks(Math.min(...all), Math.max(...all)), low = marks[0], high = marks.at(-1);
  const most = Math.max(...known.map(c => c.steps.at(-1)), 1);
  const x = step => LEFT + (WIDTH - LEFT - RIGHT) * step / most;
  const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
  const drawing = el("svg", { class: "lines", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${last}` });
  for (const value of marks) {
    drawing.append(el("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      el("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  const every = Math.max(1, round(most / 5));
  for (let step = 0; step <= most; step += every)
    drawing.append(el("text", { x: x(step), y: HEIGHT - 8, "text-anchor": x(step) > WIDTH - 3 * RIGHT ? "end" : "middle" }, String(step)));
  for (const c of known)
    drawing.append(el("path", { class: `line hue${c.i % 8}`, "stroke-dasharray": DASHES[c.i % 8], fill: "none",
      d: c.steps.map((step, k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(c.values[k]).toFixed(1)}`).join("")}));
  for (const c of known.filter(c => c.steps.length === 1))
    drawing.append(el("circle", { class: `line hue${c.i % 8}`, cx: Math.min(x(c.steps[0]), WIDTH - RIGHT - 4), cy: y(c.values[0]), r: 3.5 }));
  box.append(drawing);
  box.append(el("ul", { class: "keys" }, ...known.map(c => el("li", {},
    el("svg", { class: "stroke", viewBox: "0 0 30 10", "aria-hidden": "true" },
      el("line", { class: `line hue${c.i % 8}`, "stroke-dasharray": DASHES[c.i % 8], x1: 0, x2: 30, y1: 5, y2: 5 })),
    `${c.name}: ${short(c.values.at(-1))} at step ${c.steps.at(-1)}`))));
  return box;
}
