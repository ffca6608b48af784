"use strict";
// The token view: each token with what training knew about it.
const SHADES = {
  advantages: "advantage", difference: "log p of engine - trainer", rollout_logprobs: "log p of the engine", logprobs: "log p of the trainer",
  entropy: "entropy", ratio: "ratio in the loss", clipped: "clipped", importance: "importance weight", loss: "share of the loss", versions: "weight version", returns: "return", values: "value",
};
const SIGNED = new Set(["advantages", "difference", "loss", "returns", "values"]);
const DIGITS = { ratio: 7 }; // of 4: sequence ratios are clipped at 1.0004
const LONG_CONTEXT = 40; // tokens; a longer one is folded
const tokenState = { shade: "advantages" };

function tokenColumns(sample) {
  const trained = { ...sample.columns };
  trained.versions = sample.versions.filter((_, place) => sample.mask[place]);
  return trained;
}

// Signed columns from red over white to green, others from white to blue.
function shade(value, limits, signed) {
  if (value === null || value === undefined) return "";
  if (signed) {
    const share = limits.most ? Math.min(1, Math.abs(value) / limits.most) : 0;
    return `hsl(${value < 0 ? 8 : 145} 75% ${95 - 40 * share}%)`;
  }
  const share = limits.high > limits.low ? (value - limits.low) / (limits.high - limits.low) : 0;
  return `hsl(210 85% ${95 - 40 * share}%)`;
}

function limitsOf(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const low = known.reduce((one, two) => Math.min(one, two), Infinity), high = known.reduce((one, two) => Math.max(one, two), -Infinity);
  return { low, high, most: Math.max(Math.abs(low), Math.abs(high)) };
}

function tip(event, rows) {
  hideTip();
  const box = element("div", { class: "tip", id: "tip", role: "tooltip" }, element("table", {}, element("tbody", {}, rows.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", { class: "number" }, value))))));
  document.body.append(box);
  const at = event.target.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${at.bottom + box.offsetHeight + 8 > innerHeight ? at.top - box.offsetHeight - 4 : at.bottom + 4}px`;
}

function hideTip() { document.querySelectorAll(".tip").forEach((box) => box.remove()); }

const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥"));

const checked = ({ text, agrees }) => element("span", { class: agrees === null ? "" : agrees ? "good" : "bad" }, text);

function fromTo(values, digits) {
  const { low, high } = limitsOf(values);
  return low === high ? `${shown(low, digits)} on every token` : `from ${shown(low, digits)} to ${shown(high, digits)}`;
}

// The recorded parts and total of the reward.
function rewardText(sample, score) {
  const parts = Object.entries(score?.parts ?? {}), total = score?.total;
  const sum = parts.reduce((all, [, value]) => all + value, 0), known = typeof total === "number";
  const adds = parts.length && known && Math.abs(sum - total) <= 1e-6 * Math.max(1, Math.abs(total));
  const named = adds ? `${parts.map(([name, value]) => `${name} ${shown(value)}`).join(" + ")} = ` : "";
  const other = parts.length && known && !adds ? `; the parts do not add up to it, but to ${shown(sum)}` : "";
  return `${known ? `${named}${shown(total)}${other}; ` : ""}for training ${shown(sample.reward)}`;
}

// What is recorded, where the page has no explanation of the sample.
function recorded(sample, score) {
  const returns = sample.group_returns, mean = returns.reduce((sum, each) => sum + each, 0) / returns.length;
  const std = Math.sqrt(returns.reduce((sum, each) => sum + (each - mean) ** 2, 0) / Math.max(1, returns.length - 1));
  const { advantages = [], ratio, clipped } = sample.columns;
  const rows = [
    ["reward", rewardText(sample, score)],
    ["group", `mean ${shown(mean)}, std ${shown(std)} (n - 1)`],
    ["advantage", advantages.length ? fromTo(advantages) : "no token is trained"],
  ];
  if (ratio) rows.push(["ratio, first epoch", `${fromTo(ratio, DIGITS.ratio)}${clipped ? `; clipped: ${clipped.filter(Boolean).length} of ${counted(clipped.length, "token")}` : ""}`]);
  rows.push(["share of the loss", checked(sample.share)], ["sum check", checked(sample.total)]);
  return table(["", ""], rows);
}

// The sample from its prompt to its share of the loss, as `toolrl explain` prints it.
function explanation(sample, score, open) {
  const { folder } = report.data.runs[found.run], { sections = [], failed = [] } = sample.explanation ?? {};
  const body = sections.length ? sections.map(([title, lines]) => element("section", {}, element("h4", {}, title), lines.map((line) => element("p", {}, line)))) : [recorded(sample, score)];
  if (failed.length) body.unshift(element("p", { class: "bad" }, `checks that fail: ${failed.join(", ")}`));
  return element("details", { class: "explained", open }, element("summary", {}, "explain: from the prompt to the loss"), body,
    element("p", { class: "quiet" }, "in a terminal: ", element("code", {}, `toolrl explain ${folder} --step ${sample.step} --sample ${sample.number}`)));
}

// The token beside this one, or nearest to it in the line above or below; itself where there is none.
function neighbor(spans, place, key) {
  const box = (at) => spans[at].getClientRects()[0], by = ["ArrowLeft", "ArrowUp", "End"].includes(key) ? -1 : 1; // End: from behind
  const start = key === "Home" ? 0 : key === "End" ? spans.length - 1 : place + by, lines = key === "ArrowUp" || key === "ArrowDown";
  let best = place, top = null, gap = Infinity;
  for (let at = start; spans[at]; at += by) {
    const here = box(at);
    if (!here) continue; // folded
    if (!lines) return at;
    if (Math.abs(here.top - box(place).top) < 3) continue;
    top ??= here.top;
    if (Math.abs(here.top - top) > 3) break;
    const off = Math.abs(here.left - box(place).left);
    if (off < gap) [best, gap] = [at, off];
  }
  return best;
}

const ARROWS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];

// One token is reached by the tab key, the others by arrows; the tooltip follows.
function walkable(text, spans, first, describe) {
  let reached = first;
  if (spans[first]) spans[first].tabIndex = 0;
  text.addEventListener("keydown", (event) => {
    const place = Number(event.target.dataset.place ?? NaN);
    if (event.key === "Escape") hideTip();
    if (Number.isNaN(place) || !ARROWS.includes(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    spans[neighbor(spans, place, event.key)].focus();
  });
  text.addEventListener("focusin", (event) => {
    if (!event.target.dataset.place) return;
    spans[reached].tabIndex = -1;
    reached = Number(event.target.dataset.place);
    spans[reached].tabIndex = 0;
    tip(event, describe(reached));
  });
  text.addEventListener("focusout", hideTip);
}

function tokenView(sample, score = null) {
  const columns = tokenColumns(sample);
  const names = Object.keys(SHADES).filter((name) => columns[name]);
  if (!names.includes(tokenState.shade)) tokenState.shade = names[0];
  const ranks = [];
  let count = 0;
  sample.mask.forEach((trained, place) => { ranks[place] = trained ? count++ : -1; });
  const text = element("div", { class: "tokens", role: "group", "aria-label": "tokens: arrow keys move" });
  const legend = element("span", { class: "quiet" });
  const describe = (place) => {
    const rank = ranks[place], rows = [["token", `${sample.ids[place]} ${JSON.stringify(sample.texts[place])}`], ["place", String(place)]];
    if (rank < 0) return [...rows, ["", sample.versions[place] < 0 ? "not trained: prompt or observation" : "not trained"]];
    return [...rows, ...names.map((name) => [SHADES[name], shown(columns[name][rank], DIGITS[name])])];
  };
  const spans = sample.texts.map((letters, place) => element("span", { class: ranks[place] < 0 ? "" : "trained", "data-place": place, tabindex: -1, "aria-describedby": "tip" }, visible(letters)));
  const paint = () => {
    const values = columns[tokenState.shade] ?? [], limits = limitsOf(values), signed = SIGNED.has(tokenState.shade);
    spans.forEach((span, place) => {
      const back = ranks[place] < 0 ? "" : shade(values[ranks[place]], limits, signed);
      span.style.background = back;
      if (back) span.dataset.shade = ""; else delete span.dataset.shade;
    });
    legend.textContent = values.length ? fromTo(values, DIGITS[tokenState.shade]) : "";
  };
  const leading = sample.mask.indexOf(1) < 0 ? spans.length : sample.mask.indexOf(1);
  const folded = leading > LONG_CONTEXT;
  if (folded) text.append(element("details", {}, element("summary", {}, `${counted(leading, "token")} of context, not trained`), spans.slice(0, leading)));
  text.append(...spans.slice(folded ? leading : 0));
  text.addEventListener("mouseover", (event) => { if (event.target.dataset.place) tip(event, describe(Number(event.target.dataset.place))); });
  text.addEventListener("mouseleave", hideTip);
  walkable(text, spans, folded ? leading : 0, describe);
  const select = element("select", { class: "shade", title: "color of the tokens", "aria-label": "color of the tokens", onchange: (event) => { tokenState.shade = event.target.value; paint(); } },
    names.map((name) => element("option", { value: name, selected: name === tokenState.shade }, SHADES[name])));
  paint();
  const segment = sample.num_segments > 1 ? `segment ${sample.segment + 1} of ${sample.num_segments}: ` : "";
  return element("section", { class: "segment" },
    element("p", {}, `${segment}${count} of ${counted(sample.ids.length, "token")} trained (underlined). Returns of the group: ${sample.group_returns.map((value) => shown(value, 3)).join(", ")}`),
    explanation(sample, score, false), element("div", { class: "bar" }, select, legend), text);
}

