// A search of the server, followed until it ends: a button that starts it, one that stops it, and how far it is.
import { ask, el, seen } from "./page.js";

const EVERY = 300;

// `begin` gives the search's name, `found(result, name)` shows what it found. A new one takes the place of one that runs.
export function search(text, begin, found, errors) {
  const bar = el("progress", { max: 1, "aria-label": text }), words = el("p", { class: "soft", role: "status" });
  const progress = el("div", { hidden: true }, bar, words);
  let current = null;
  const start = el("button", { type: "button", class: "main", onclick: run }, text);
  const stop = el("button", { type: "button", disabled: true, onclick: () => end().catch(e => errors.say(e)) }, "Stop");
  const end = keepalive => current?.job ? ask("/api/job", { job: current.job, stop: true }, keepalive) : Promise.resolve();

  // An end that is not known yet is shown as such, and not as a full bar.
  function tell(said, share) {
    if (words.textContent !== said) words.textContent = said;
    if (share === null || share >= 1) bar.removeAttribute("value"); else bar.value = share;
  }
  async function run() {
    errors.say(null);
    end().catch(() => {});
    const mine = current = { job: null };
    tell("starting …", null);
    progress.hidden = bar.hidden = false;
    try {
      mine.job = (await begin()).job;
      if (mine !== current) return void ask("/api/job", { job: mine.job, stop: true });
      stop.disabled = false;
      for (;;) {
        const now = await ask("/api/job", { job: mine.job });
        if (mine !== current) return;
        if (now.state === "failed") throw new Error(now.error);
        if (now.state === "stopped") { words.textContent = "stopped"; break; }
        if (now.state === "done") { await found(now.result, mine.job); words.textContent = "done"; progress.hidden = true; break; }
        if (now.progress) tell(now.progress.said, now.progress.share);
        await seen(EVERY);
      }
    } catch (error) {
      if (mine !== current) return;
      words.textContent = "failed";
      errors.say(error);
    }
    bar.hidden = true;
    stop.disabled = true;
    current = null;
  }
  addEventListener("pagehide", () => end(true).catch(() => {}));
  return { buttons: el("div", { class: "bar" }, start, stop), progress, run };
}
