// Which page is shown: each is a module with `show(place)`, at an address of its own.
import { el, keepToken } from "./page.js";

const PAGES = { schedules: "Schedules", compare: "Compare", plans: "Plans", runs: "Runs" };

keepToken();
const name = location.pathname.slice(1);
document.title = `${PAGES[name]} — Counterflow`;
document.getElementById("pages").append(...Object.entries(PAGES).map(([page, text]) =>
  el("a", { href: `/${page}`, ...(page === name ? { "aria-current": "page" } : {}) }, text)));
const { show } = await import(`./${name}.js`);
await show(document.getElementById("page"));
document.documentElement.dataset.ready = "yes";
