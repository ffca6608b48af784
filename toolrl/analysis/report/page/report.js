"use strict";
// The report's frame: data, pages, keys, theme. Text of models and files enters the page as text nodes only.
const report = { pages: [], data: null, chunks: new Map(), cleanups: [] };

// Controls, and marks that turn the direction of what follows them, as the terminal shows them.
const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const plain = (text) => (typeof text === "string" ? text.replace(CONTROLS, "\ufffd") : text);

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(plain));
  return made;
}

// A table that is wider than the page scrolls by keys, too.
const scrollers = new ResizeObserver((entries) => entries.forEach(({ target }) => { target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1; }));

function table(head, rows, numbersFrom = 99) {
  const kind = (column) => (column >= numbersFrom ? "number" : "");
  const cells = (tag, row) => row.map((cell, column) => element(tag, { class: kind(column) }, cell));
  const body = rows.map((row) => element("tr", {}, cells("td", row)));
  const box = element("div", { class: "scroll", role: "group", "aria-label": "table" }, element("table", {},
    element("thead", {}, element("tr", {}, cells("th", head))), element("tbody", {}, body)));
  scrollers.observe(box);
  return box;
}

function shown(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(+value.toPrecision(digits));
  return typeof value === "string" ? value : Array.isArray(value) ? value.map((each) => shown(each)).join(", ") : JSON.stringify(value);
}

const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined); // a metric may be called constructor

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const color = (name) => {
  const probe = element("span", { style: `color: var(--${name})` });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

async function decoded(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// The data of a chunk; the last few are remembered.
async function chunk(number) {
  const { chunks } = report;
  if (!chunks.has(number)) {
    chunks.set(number, decoded(document.getElementById(`chunk-${number}`).textContent));
    if (chunks.size > 400) chunks.delete(chunks.keys().next().value);
  }
  return chunks.get(number);
}

function addPage(id, title, show) { report.pages.push({ id, title, show }); }

function route() {
  return location.hash.slice(1).split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
}

function go(...parts) { location.hash = parts.map(encodeURIComponent).join("/"); }

function open() {
  const [id, ...rest] = route();
  const page = report.pages.find((each) => each.id === id) ?? report.pages[0];
  document.querySelectorAll("nav a").forEach((link) => {
    if (link.hash === `#${page.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  if (report.current === page && page.update) { page.update(rest); return; }
  if (report.shown !== page.id) scrollTo(0, 0);
  report.shown = page.id;
  report.current = page;
  report.cleanups.splice(0).forEach((clean) => clean());
  const main = document.querySelector("main");
  main.replaceChildren();
  page.update = page.show(main, rest) ?? null;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("toolrl-theme", theme); } catch { /* a file may have no storage */ }
  if (report.current) { report.current = null; open(); }
}

function toggleTheme() {
  const set = document.documentElement.dataset.theme;
  const dark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("select, textarea, input:not([type=checkbox])")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const page = report.pages[Number(event.key) - 1];
  if (page) go(page.id);
  else if (event.key === "d") toggleTheme();
  else if (!report.current?.keys?.[event.key]) return;
  else report.current.keys[event.key]();
  event.preventDefault();
}

// Server-sent events of `toolrl report --serve`: the data are loaded again, filters and place are kept. A page with a
// function `refresh` takes the new data itself, or returns false and is shown anew. The document names the version that it
// has, so that a step which ended before the stream was open is an event, too.
function listen() {
  const events = new EventSource(`events?seen=${report.data.live}`);
  let last = Promise.resolve();
  events.addEventListener("changed", (event) => {
    last = last.then(() => (event.data === report.data.live ? null : refresh())).catch(() => null); // the server may have ended
  });
}

async function refresh() {
  const answer = await fetch(location.pathname);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const kind = 'script[type="text/plain"]', top = scrollY, { id, selectionStart, selectionEnd } = document.activeElement ?? {};
  document.querySelectorAll(kind).forEach((old) => old.remove());
  document.body.append(...page.querySelectorAll(kind));
  report.chunks.clear();
  report.data = await decoded(document.getElementById("data").textContent);
  if (!report.current?.refresh?.()) {
    report.current = null;
    open();
    const field = id ? document.getElementById(id) : null;
    field?.focus();
    if (typeof selectionStart === "number") field?.setSelectionRange(selectionStart, selectionEnd);
    scrollTo(0, top);
  }
  document.documentElement.dataset.refreshed = Number(document.documentElement.dataset.refreshed ?? 0) + 1;
}

async function start() {
  try { const theme = localStorage.getItem("toolrl-theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* no storage */ }
  report.data = await decoded(document.getElementById("data").textContent);
  const { runs } = report.data;
  document.querySelector("h1").textContent = plain(runs.map((run) => run.name).join(" · "));
  document.querySelector("nav").append(...report.pages.map((page, number) =>
    element("a", { href: `#${page.id}`, title: `key ${number + 1}` }, page.title)));
  document.querySelector("footer").textContent =
    `toolrl ${report.data.version}, ${report.data.made}. Keys: 1 to ${report.pages.length} pages, d light or dark, ` +
    "in rollouts j and k next and previous, t tokens (arrows move), e explain, p pin, / search, Escape leaves a field.";
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", open);
  if (report.data.live) listen();
  open();
  document.documentElement.dataset.ready = "yes";
}

document.addEventListener("DOMContentLoaded", start);
