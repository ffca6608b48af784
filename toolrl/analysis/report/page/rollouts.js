"use strict";
// The rollout viewer: a list with filters, and one or several rollouts of a group beside each other.
const STATUS = { s: "success", u: "user error", t: "timeout", n: "unavailable" };
const PAGE_LENGTH = 200;
const LONG_SYSTEM = 300; // characters; a longer system message is folded
const found = { run: 0, step: "", task: "", stop: "", status: "", low: "", high: "", text: "", equal: false, kept: false, rows: [], shown: PAGE_LENGTH, tokens: false, explain: false,
  at: "", beside: [], pinned: "" }; // addresses, which stay when rows are numbered anew

const meta = () => report.data.runs[found.run].rollouts.meta;

const address = (row) => `${found.run}/${meta().step[row]}/${meta().line[row]}`;

function rowAt(text) {
  const [run, step, line] = text.split("/").map(Number), m = meta();
  return run === found.run ? m.step.findIndex((each, place) => each === step && m.line[place] === line) : -1;
}

// Row numbers that pass the filters on metadata.
function filtered() {
  const m = meta(), rows = [], number = (text) => (text === "" ? null : Number(text));
  const step = number(found.step), low = number(found.low), high = number(found.high);
  for (let row = 0; row < m.step.length; row++) {
    if (step !== null && m.step[row] !== step) continue;
    if (low !== null && m.reward[row] < low) continue;
    if (high !== null && m.reward[row] > high) continue;
    if (found.stop && m.stop_reason[row] !== found.stop) continue;
    if (found.status && !m.tool_status[row].includes(found.status)) continue;
    if (found.equal && !m.equal[row]) continue;
    if (found.kept && !m.tokens[row].length) continue;
    if (found.task && !String(m.task_id[row]).includes(found.task)) continue;
    rows.push(row);
  }
  return rows.sort((one, two) => m.step[one] - m.step[two] || m.line[one] - m.line[two]);
}

async function detail(row) { return (await chunk(meta().chunk[row]))[meta().place[row]]; }

// The texts of a rollout, as they are shown.
function textsOf(one) {
  const called = (message) => (message.tool_calls ?? []).flatMap((call) => [call.name, pretty(call.arguments)]);
  const said = [...(one.prompt ?? []), ...(one.responses ?? [])].flatMap((message) => [message.content, ...called(message)]);
  const used = (one.tool_uses ?? []).map((use) => use.name);
  return [...said, one.answer, ...(one.reasons ?? []), ...(one.tools ?? []), ...used].filter(Boolean).join("\n");
}

async function withText(rows, text) {
  const chosen = [], wanted = text.toLowerCase(), { data } = report;
  for (const row of rows) {
    if (report.data !== data) return []; // rows are numbered anew, and searched again
    if (textsOf(await detail(row)).toLowerCase().includes(wanted)) chosen.push(row);
  }
  return chosen;
}

const pretty = (given) => (typeof given === "string" ? given : JSON.stringify(given, null, 2));

function callBox(name, given) {
  return element("div", { class: "call" }, element("b", {}, `call of ${name}`), element("pre", {}, pretty(given)));
}

// The text of a message with the tool calls in it, which formats write as JSON objects in tags, set apart.
function messageParts(content) {
  const parts = [], tags = /<tool_call>([\s\S]*?)<\/tool_call>/g;
  let last = 0;
  for (const match of content.matchAll(tags)) {
    parts.push(element("pre", {}, content.slice(last, match.index)));
    const calls = match[1].trim().split("\n").map((line) => { try { return JSON.parse(line); } catch { return null; } });
    if (calls.every((call) => call && typeof call.name === "string")) parts.push(...calls.map((call) => callBox(call.name, call.arguments ?? call.parameters)));
    else parts.push(callBox("a tool, as written", match[1]));
    last = match.index + match[0].length;
  }
  return [...parts, element("pre", {}, content.slice(last))].filter((part) => part.textContent.trim());
}

function messageBox(message, note = "") {
  const calls = (message.tool_calls ?? []).map((call) => callBox(call.name, call.arguments));
  const kind = ["user", "system", "assistant", "tool", "ipython"].includes(message.role) ? message.role : "";
  const text = String(message.content);
  const body = [messageParts(text), calls].flat();
  if (kind === "system" && text.length > LONG_SYSTEM) {
    return element("details", { class: "message" }, element("summary", {}, element("b", {}, `system, ${text.length} characters`)), body);
  }
  return element("div", { class: `message ${kind}` }, element("b", {}, `${message.role}${note}`), body);
}

// What a rollout's transcript says, as boxes.
function dialogue(one) {
  const gold = one.answer ? [element("div", { class: "message gold" }, element("b", {}, "gold answer"), messageParts(String(one.answer)))] : [];
  const uses = one.tool_uses?.length ? [table(["tool", "outcome", "seconds"], one.tool_uses.map((use) => [use.name, use.status, shown(use.seconds, 3)]), 2)] : [];
  const { segments = [] } = one, last = Math.max(...segments);
  let turn = 0;
  const segmentOf = (message) => (message.role === "assistant" && segments.length ? `, segment ${segments[turn++] + 1} of ${last + 1}` : "");
  const said = (one.responses ?? []).map((message) => messageBox(message, segmentOf(message)));
  return [...(one.prompt ?? []).map((message) => messageBox(message)), ...said, ...gold, ...uses];
}

async function rolloutBox(row) {
  const m = meta(), one = await detail(row), parts = one.score?.parts ?? {};
  const box = element("article", { "data-row": row },
    element("h3", {}, `step ${m.step[row]}, rollout ${m.index[row]}: reward ${shown(m.reward[row])}`),
    element("p", { class: "quiet" }, [m.task_id[row], m.stop_reason[row], counted(m.num_tokens[row], "token"), one.tools ? `tools: ${one.tools.join(", ")}` : "", one.exceeded ? `scored as empty: ${one.exceeded} exceeded` : ""].filter(Boolean).join(" · ")),
    table(["part of the reward", "points"], [...Object.entries(parts).map(([name, value]) => [name, shown(value)]), ["total, before shaping in the group", shown(one.score?.total)]], 1));
  if (one.reasons?.length) box.append(element("details", { class: "reasons", open: true }, element("summary", {}, "why this score"), element("ul", {}, one.reasons.map((line) => element("li", {}, line)))));
  const wanted = found.tokens || found.explain;
  if (wanted && m.tokens[row].length) {
    for (const number of m.tokens[row]) {
      const sample = await chunk(number);
      if (sample.step !== m.step[row]) box.append(element("h3", {}, `trained again in step ${sample.step}`));
      box.append(found.tokens ? tokenView(sample, one.score) : explanation(sample, one.score, true));
    }
    return box;
  }
  if (wanted) box.append(element("p", { class: "quiet" }, "The tokens of this rollout are not in the report (trainer.samples_kept); the filter “with tokens” lists those that are."));
  box.append(...dialogue(one));
  return box;
}

function groupOf(row) {
  const m = meta(), rows = [];
  for (let other = 0; other < m.step.length; other++) if (m.step[other] === m.step[row] && m.group[other] === m.group[row]) rows.push(other);
  return rows.sort((one, two) => m.line[one] - m.line[two]);
}

addPage("rollouts", "Rollouts", (main, rest) => {
  const list = element("div", { class: "list", role: "group", "aria-label": "rollouts" });
  const count = element("span", { class: "quiet", id: "count" });
  const again = element("p", { class: "quiet", id: "reused" });
  const right = element("div", {});
  report.cleanups.push(hideTip);
  const selects = {};
  let current = null, turn = 0, opening = "";

  // again: the same search in new data, which moves nothing
  async function search(again = false) {
    const mine = ++turn, started = performance.now();
    let rows = filtered();
    found.filterMs = performance.now() - started;
    if (found.text) rows = await withText(rows, found.text);
    if (mine !== turn) return;
    found.rows = rows;
    const { scrollTop } = list, held = list.contains(document.activeElement) ? document.activeElement.dataset.at : "";
    if (!again) found.shown = PAGE_LENGTH;
    fill();
    if (again) {
      list.scrollTop = scrollTop;
      if (held) list.querySelector(`[data-at="${held}"]`)?.focus({ preventScroll: true });
      if (right.childNodes.length) return;
    }
    const wanted = opening ? rowAt(opening) : -1;
    opening = "";
    if (wanted >= 0) await select(wanted);
    else if (!rows.includes(current) && rows.length) await select(rows[0]);
  }

  function fill() {
    const m = meta(), { rollouts } = report.data.runs[found.run];
    count.textContent = `${found.rows.length} of ${counted(rollouts.shown, "rollout")}${rollouts.left_out.length ? ` (${rollouts.left_out.join("; ")})` : ""}`;
    const reused = rollouts.reused.filter(([step]) => String(step) === found.step);
    again.replaceChildren(...(reused.length ? ["trained again in this step, generated in an earlier one: "] : []),
      ...reused.flatMap(([, step, line]) => [element("a", { href: `#rollouts/${found.run}/${step}/${line}` }, `step ${step}, line ${line + 1}`), " "]));
    list.replaceChildren(...found.rows.slice(0, found.shown).map((row) => element("button", { class: "item", "data-row": row, "data-at": address(row), "aria-current": String(row === current), onclick: () => select(row) },
      `step ${m.step[row]} · ${shown(m.reward[row], 3)} · ${counted(m.num_tokens[row], "token")}${m.tokens[row].length ? " ◆" : ""}`, element("small", {}, `${m.task_id[row]} #${m.index[row]} ${m.stop_reason[row]}`))));
    if (found.rows.length > found.shown) list.append(element("button", { class: "item", onclick: () => { found.shown += PAGE_LENGTH; fill(); } }, `${found.rows.length - found.shown} more`));
  }

  async function select(row) {
    current = row;
    if (address(row) !== found.at) Object.assign(found, { at: address(row), beside: [] });
    list.querySelectorAll(".item").forEach((item) => item.setAttribute("aria-current", String(item.dataset.row === String(row))));
    list.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
    await render();
  }

  async function render() {
    const m = meta(), rows = groupOf(current), { data } = report, { at: shownAt } = found;
    history.replaceState(null, "", `#rollouts/${found.at}${found.explain ? "/explain" : ""}`);
    const pick = (other) => {
      const at = address(other), isShown = other === current || found.beside.includes(at);
      return element("button", { "aria-pressed": String(isShown), title: "show beside", onclick: () => {
        if (at === found.at) return;
        found.beside = found.beside.includes(at) ? found.beside.filter((each) => each !== at) : [...found.beside, at];
        render();
      } }, `#${m.index[other]}: ${shown(m.reward[other], 3)}`);
    };
    const shownRows = [...(found.pinned === found.at ? [] : [found.pinned]), found.at, ...found.beside].map(rowAt);
    hideTip();
    let boxes = [];
    try { boxes = await Promise.all(shownRows.filter((each) => each >= 0).map(rolloutBox)); } catch (error) { if (report.data === data) throw error; }
    if (shownAt !== found.at) return;
    if (report.data !== data) { if (current !== null) render(); return; } // rows are numbered anew
    right.replaceChildren(
      element("div", { class: "bar" }, element("button", { id: "tokens", "aria-pressed": String(found.tokens), onclick: toggle }, "tokens (t)"),
        element("button", { id: "explain", "aria-pressed": String(found.explain), onclick: explain }, "explain (e)"),
        element("button", { id: "pin", "aria-pressed": String(found.pinned === found.at), title: "keep it beside those of other groups", onclick: pin }, "pin (p)"),
        element("span", { class: "quiet" }, "group: "), rows.slice(0, 64).map(pick)),
      element("div", { class: "beside" }, boxes));
  }

  const show = (tokens, explain) => { Object.assign(found, { tokens, explain }); if (current !== null) render(); };
  const toggle = () => show(!found.tokens, false), explain = () => show(false, !found.explain);
  const pin = () => { found.pinned = found.pinned === found.at ? "" : found.at; if (current !== null) render(); };
  const move = (by) => { const at = found.rows.indexOf(current) + by; if (found.rows[at] !== undefined) { if (at >= found.shown) { found.shown = at + PAGE_LENGTH; fill(); } select(found.rows[at]); } };
  const input = (name, placeholder, type = "text") => element("input", { type, placeholder, title: placeholder, "aria-label": placeholder, value: found[name], size: type === "number" ? 5 : 12, style: type === "number" ? "width:8.5em" : "", step: "any", id: name === "text" ? "search" : `filter-${name}`, oninput: (event) => { found[name] = event.target.value; search(); } });
  const choice = (name, label) => selects[name] = element("select", { title: label, "aria-label": label, id: `filter-${name}`, onchange: (event) => { found[name] = event.target.value; search(); } }, element("option", { value: "" }, label));
  const check = (name, label, title = "") => element("label", { title }, element("input", { type: "checkbox", id: `filter-${name}`, checked: found[name], onchange: (event) => { found[name] = event.target.checked; search(); } }), ` ${label}`);

  const follow = ([run, step, line, view]) => {
    found.run = Math.max(0, Math.min(Math.trunc(Number(run)) || 0, report.data.runs.length - 1));
    opening = [found.run, step, line].join("/");
    Object.assign(found, view === "explain" ? { tokens: false, explain: true } : { explain: false });
  };
  if (rest.length >= 3) follow(rest);
  // New choices come behind those that are already offered, so that a refresh replaces nothing.
  const offer = () => {
    const { stop_reason: stops, tool_status: statuses } = meta();
    const choices = {
      stop: [...new Set(stops)].filter(Boolean).sort().map((stop) => [stop, stop]),
      status: Object.entries(STATUS).filter(([letter]) => statuses.some((letters) => letters.includes(letter))),
    };
    for (const [name, select] of Object.entries(selects)) {
      const offered = new Set([...select.options].map((each) => each.value));
      select.append(...choices[name].filter(([value]) => !offered.has(value)).map(([value, text]) => element("option", { value, selected: found[name] === value }, text)));
      select.hidden = select.options.length === 1;
    }
  };
  const build = () => {
    const m = meta();
    main.replaceChildren();
    if (!m.step.length) { main.append(element("p", {}, "There are no transcripts in this run's folder.")); return; }
    const runs = report.data.runs.length > 1 ? [element("select", { title: "run", "aria-label": "run", onchange: (event) => { found.run = Number(event.target.value); current = null; found.pinned = ""; build(); } }, report.data.runs.map((run, number) => element("option", { value: number, selected: number === found.run }, run.name)))] : [];
    main.append(element("div", { class: "bar" }, runs, input("step", "step", "number"), input("low", "reward from", "number"), input("high", "reward to", "number"), input("task", "task"),
      choice("stop", "stop reason"), choice("status", "tool status"), input("text", "text (/)", "search"), check("kept", "with tokens"), check("equal", "groups of equal returns", "Advantages that are relative to the group are zero in them; those of a critic are not."), count), again,
      element("div", { class: "viewer" }, list, right));
    offer();
    for (const [name, select] of Object.entries(selects)) found[name] = select.value; // another run may not offer it
    search();
  };
  const page = report.pages.find((each) => each.id === "rollouts");
  page.refresh = () => {
    if (!list.isConnected || !meta().step.length) return false; // there were, or are, no transcripts
    offer();
    current = found.at && rowAt(found.at) >= 0 ? rowAt(found.at) : null;
    search(true);
    return true;
  };
  page.keys = { j: () => move(1), k: () => move(-1), t: toggle, e: explain, p: pin, "/": () => document.getElementById("search").focus() };
  build();
  return (parts) => {
    if (parts.length < 3) return;
    const before = found.run;
    follow(parts);
    if (found.run !== before) { current = null; found.pinned = ""; build(); return; }
    const row = rowAt(opening);
    opening = "";
    if (row >= 0) select(row);
  };
});
