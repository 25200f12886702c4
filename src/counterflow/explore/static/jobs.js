// A search of the server, followed until it ends: its progress, a button that stops it, what it found.
import { ask, el } from "./page.js";

const EVERY = 300;

// `begin` starts it and gives its name; `told(progress)` says in words how far it is and gives its share or null.
// `atOnce`: it begins with the page.
export function search(text, begin, told, found, errors, { atOnce = false } = {}) {
  const bar = el("progress", { max: 1, "aria-label": text }), words = el("p", { class: "soft", role: "status" });
  const shown = el("div", { hidden: true }, bar, words);
  let job = null;
  const start = el("button", { type: "button", class: "main", onclick: run }, text);
  const stop = el("button", { type: "button", disabled: true, onclick: () => job && ask("/api/job", { job, stop: true }).catch(e => errors.say(e)) }, "Stop");

  async function run() {
    errors.say(null);
    start.disabled = true;
    words.textContent = "starting …";
    bar.removeAttribute("value");
    shown.hidden = false;
    try {
      ({ job } = await begin());
      stop.disabled = false;
      for (;;) {
        const now = await ask("/api/job", { job });
        if (now.progress) {
          const [said, share] = told(now.progress);
          if (words.textContent !== said) words.textContent = said;
          if (share !== null) bar.value = share;
        }
        if (now.state === "failed") throw new Error(now.error);
        if (now.state === "stopped") { words.textContent = "stopped"; bar.value = 0; break; }
        if (now.state === "done") { await found(now.result); words.textContent = "done"; bar.value = 1; break; }
        await new Promise(resolve => setTimeout(resolve, EVERY));
      }
    } catch (error) {
      words.textContent = "failed";
      errors.say(error);
    } finally {
      start.disabled = false;
      stop.disabled = true;
    }
  }
  addEventListener("pagehide", () => { if (!stop.disabled) ask("/api/job", { job, stop: true }, true).catch(() => {}); });
  if (atOnce) queueMicrotask(run);
  return el("div", {}, el("div", { class: "bar" }, start, stop), shown);
}
