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
  const trainer = trained.logprobs ?? trained.old_logprobs;
  if (trainer && trained.rollout_logprobs) trained.difference = trained.rollout_logprobs.map((value, place) => (value === null ? null : value - trainer[place]));
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
  const box = element("div", { class: "tip", role: "tooltip" }, element("table", {}, element("tbody", {}, rows.map(([name, value]) => element("tr", {}, element("td", {}, name), element("td", { class: "number" }, value))))));
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

// From the reward to the share of the loss, and whether the shares of all samples add up to the logged loss.
function explanation(sample, score) {
  const mean = (values) => values.reduce((one, two) => one + two, 0) / values.length;
  const returns = sample.group_returns, centre = mean(returns), parts = Object.entries(score?.parts ?? {});
  const std = Math.sqrt(returns.reduce((sum, each) => sum + (each - centre) ** 2, 0) / Math.max(1, returns.length - 1));
  const { advantages = [], ratio, clipped } = sample.columns, own = sample.reward - centre;
  const arithmetic = [["(r - mean) / (std + 1e-6)", own / (std + 1e-6)], ["r - mean", own]].find(([, value]) => advantages.length && advantages.every((each) => Math.abs(each - value) <= 1e-3 * Math.abs(value) + 1e-6));
  const how = arithmetic ? ` = ${arithmetic[0]}` : "";
  const { folder } = report.data.runs[found.run], command = `toolrl explain ${folder} --step ${sample.step} --sample ${sample.number}`;
  const rows = [
    ["reward", `${parts.map(([name, value]) => `${name} ${shown(value)}`).join(" + ")}${parts.length ? " = " : ""}${shown(parts.length ? parts.reduce((sum, [, value]) => sum + value, 0) : score?.total)}; for training ${shown(sample.reward)}`],
    ["group", `mean ${shown(centre)}, std ${shown(std)} (n - 1)`],
    ["advantage", advantages.length ? `${fromTo(advantages)}${how}` : "no token is trained"],
  ];
  if (ratio) rows.push(["ratio, first epoch", `${fromTo(ratio, DIGITS.ratio)}${clipped ? `; clipped: ${clipped.filter(Boolean).length} of ${clipped.length} tokens` : ""}`]);
  rows.push(["share of the loss", checked(sample.share)], ["sum check", checked(sample.total)], ["in full", element("code", {}, command)]);
  return element("details", { class: "explained" }, element("summary", {}, "from the reward to the loss"), table(["", ""], rows));
}

function tokenView(sample, score = null) {
  const columns = tokenColumns(sample);
  const names = Object.keys(SHADES).filter((name) => columns[name]);
  if (!names.includes(tokenState.shade)) tokenState.shade = names[0];
  const ranks = [];
  let count = 0;
  sample.mask.forEach((trained, place) => { ranks[place] = trained ? count++ : -1; });
  const text = element("div", { class: "tokens" });
  const legend = element("span", { class: "quiet" });
  const describe = (place) => {
    const rank = ranks[place], rows = [["token", `${sample.ids[place]} ${JSON.stringify(sample.texts[place])}`], ["place", String(place)]];
    if (rank < 0) return [...rows, ["", sample.versions[place] < 0 ? "not trained: prompt or observation" : "not trained"]];
    return [...rows, ...names.map((name) => [SHADES[name], shown(columns[name][rank], DIGITS[name])])];
  };
  const spans = sample.texts.map((letters, place) => element("span", { class: ranks[place] < 0 ? "" : "trained", "data-place": place }, visible(letters)));
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
  if (folded) text.append(element("details", {}, element("summary", {}, `${leading} tokens of context, not trained`), spans.slice(0, leading)));
  text.append(...spans.slice(folded ? leading : 0));
  text.addEventListener("mouseover", (event) => { if (event.target.dataset.place) tip(event, describe(Number(event.target.dataset.place))); });
  text.addEventListener("mouseleave", hideTip);
  const select = element("select", { class: "shade", title: "color of the tokens", onchange: (event) => { tokenState.shade = event.target.value; paint(); } },
    names.map((name) => element("option", { value: name, selected: name === tokenState.shade }, SHADES[name])));
  paint();
  const segment = sample.num_segments > 1 ? `segment ${sample.segment + 1} of ${sample.num_segments}: ` : "";
  return element("section", { class: "segment" },
    element("p", {}, `${segment}${count} of ${sample.ids.length} tokens are trained (underlined). Returns of the group: ${sample.group_returns.map((value) => shown(value, 3)).join(", ")}`),
    explanation(sample, score), element("div", { class: "bar" }, select, legend), text);
}

