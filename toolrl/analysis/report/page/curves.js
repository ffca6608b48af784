"use strict";
// Overview, curves, validation, times, distributions.
const HUES = ["#2f7de1", "#e0762f", "#2fa866", "#b04fd0", "#d03f5c", "#8a8f2a", "#1fa3a3", "#96644a"];
const view = { axis: "step", smoothing: 0.7, filter: "" };
const AXES = { step: "step", time: "hours", tokens: "million tokens" };

function smoothed(values, share) {
  let last = null;
  return values.map((value) => {
    if (value === null) return null;
    last = last === null ? value : share * last + (1 - share) * value;
    return last;
  });
}

// Vertical lines: collapse, gap of engine and trainer, staleness.
const MARKS = { collapse: "bad", gap: "accent", staleness: "quiet" };

function marksPlugin(marks) {
  return { hooks: { draw: [(plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4, 4]);
    for (const [at, kind] of marks) {
      ctx.strokeStyle = color(MARKS[kind]);
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }] } };
}

// A constant has room above and below it.
function range(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

const STEPS = [1, 2, 5].flatMap((first) => Array.from({ length: 8 }, (_, power) => first * 10 ** power)).sort((one, two) => one - two);

// As many digits as the distance of the ticks needs.
function ticks(_, values, __, ___, distance) {
  const digits = Math.min(100, Math.max(0, 1 - Math.floor(Math.log10(distance))));
  return values.map((value) => (value === null ? "" : String(+value.toFixed(digits))));
}

// The width of the longest label.
function labelWidth(plot, labels, number, cycle) {
  const axis = plot.axes[number];
  if (cycle > 1) return axis._size; // the layout has to come to an end
  [plot.ctx.font] = axis.font;
  const widest = Math.max(0, ...(labels ?? []).map((label) => plot.ctx.measureText(label).width)) / devicePixelRatio;
  return Math.max(40, Math.ceil(axis.ticks.size + axis.gap + widest) + 4);
}

// The ends of every curve, in words.
function described(data, series) {
  return series.map(({ label }, number) => {
    const known = data[number + 1].filter((value) => value !== null && value !== undefined);
    return known.length ? `${label} from ${shown(known[0])} to ${shown(known.at(-1))}` : `${label} has no values`;
  }).join("; ");
}

// series: [{label, color, width, fill, dash}] for data [xs, ys, ..]
function draw(box, data, series, { height = 180, marks = [], legend = report.data.runs.length > 1, bands = [], zero = false } = {}) {
  const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
  const format = (_, value) => (value === null || value === undefined ? "" : shown(value));
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth - 20), height, bands, legend: { show: legend },
    scales: { x: { time: false }, y: { range: (_, low, high) => (zero ? [0, high * 1.05] : range(low, high)) } },
    axes: [{ ...axis, label: AXES[view.axis], labelSize: 18, size: 34, ...(view.axis === "step" ? { incrs: STEPS } : {}) }, { ...axis, size: labelWidth, values: ticks }],
    series: [{ label: AXES[view.axis], value: format }, ...series.map((each) => ({
      stroke: each.color, width: each.width ?? 1.5, label: each.label, fill: each.fill, dash: each.dash, value: format,
      spanGaps: true, points: { show: data[0].length < 40 && !each.quiet, size: 4 },
    }))],
    plugins: marks.length ? [marksPlugin(marks)] : [],
  }, data, box);
  const { canvas } = plot.ctx;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${box.querySelector("h3")?.textContent ?? "curve"}: ${described(data, series)}`);
  const watch = new ResizeObserver(() => plot.setSize({ width: Math.max(200, box.clientWidth - 20), height }));
  watch.observe(box);
  report.cleanups.push(() => { watch.disconnect(); plot.destroy(); });
  return plot;
}

// Draw once the box is near the visible part of the page.
function whenVisible(box, make) {
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); make(); }
  }, { rootMargin: "300px" });
  watch.observe(box);
  report.cleanups.push(() => watch.disconnect());
}

function axisOf(run) { return run.metrics[view.axis]; }

// Where a step is on the axis: at the last step before it that the curves have.
function at(run, step) {
  if (view.axis === "step") return step;
  const place = run.metrics.step.findLastIndex((each) => each <= step);
  return place < 0 ? undefined : axisOf(run)[place];
}

function marksOf(run) {
  return run.marks.map((mark) => [at(run, mark.step), mark.kind]).filter(([x]) => x !== undefined);
}

function metricBox(name, wide = false) {
  const info = own(report.data.metrics, name);
  const box = element("div", { class: wide ? "plot wide" : "plot", "data-metric": name },
    element("h3", {}, name), element("p", {}, info ? `${info.unit === "1" ? "" : `${info.unit}: `}${info.meaning.replaceAll("`", "")}` : ""));
  whenVisible(box, () => drawMetric(box, name));
  return box;
}

function drawMetric(box, name) {
  const tables = [], series = [];
  report.data.runs.forEach((run, number) => {
    const values = own(run.metrics, name);
    if (!values) return;
    const points = axisOf(run).map((x, place) => [x, values[place]]).filter(([, y]) => y !== null);
    const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
    const hue = HUES[number % HUES.length], many = report.data.runs.length > 1;
    tables.push([xs, ys, smoothed(ys, /^(val|eval)\//.test(name) ? 0 : view.smoothing)]);
    series.push({ label: many ? `${run.name}, raw` : "raw", color: `${hue}55`, width: 1, quiet: true },
      { label: many ? run.name : "smoothed", color: hue, width: 2 });
  });
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  draw(box, data, series, { marks: report.data.runs.flatMap(marksOf) });
}

function metricNames() {
  return [...new Set(report.data.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !Object.hasOwn(AXES, name)).sort();
}

const present = (names) => names.filter((name) => report.data.runs.some((run) => run.metrics[name]));

addPage("overview", "Overview", (main) => {
  for (const [number, run] of report.data.runs.entries()) {
    const hue = report.data.runs.length > 1 ? [element("span", { class: "swatch", style: `background:${HUES[number % HUES.length]}` }), " "] : [];
    const setting = (name) => shown(run.all_settings[name]);
    main.append(element("h2", {}, hue, run.name),
      element("p", { class: "quiet" }, [setting("model.path"), setting("algorithm.name"), setting("data.train_files"),
        counted(run.metrics.step.at(-1) ?? 0, "step")].filter(Boolean).join(" · ")),
      element("p", { class: "lead verdict" }, run.verdict.join(" ")));
    if (run.notes.length) main.append(element("ul", { class: "bad notes" }, run.notes.map((note) => element("li", {}, note))));
    for (const [kind, name] of Object.entries(MARKS)) {
      const those = run.marks.filter((mark) => mark.kind === kind);
      if (those.length) main.append(element("p", { class: "mark", style: `color: var(--${name})` }, `Marks on the curves, ${kind}: ${those.map((mark) => `step ${mark.step}: ${mark.text}`).join("; ")}`));
    }
    if (run.left_out.length) main.append(element("p", { class: "quiet left-out" }, `Limits of this file: ${run.left_out.join("; ")}.`));
  }
  const names = present(["reward/total", "actor/entropy", "response_length/mean", "reward/zero_variance_groups", "engine/logprob_diff_mean", "actor/grad_norm"]);
  if (!names.includes("reward/total")) names.unshift(...present(["actor/loss", "val/demonstrations/loss"]));
  main.append(element("div", { class: "grid" }, names.map((name) => metricBox(name))));
  if (names.length) main.append(element("p", { class: "quiet" }, "Thin lines: raw. Thick lines: smoothed, as chosen on the page Curves."));
  const { runs } = report.data;
  for (const run of runs) {
    main.append(element("h2", {}, runs.length > 1 ? `Settings of ${run.name} other than the defaults` : "Settings other than the defaults"),
      table(["setting", "value", "default"], Object.entries(run.settings).map(([name, [value, other]]) => [name, shown(value), shown(other)])));
  }
});

addPage("curves", "Curves", (main) => {
  const grid = element("div", {});
  const show = () => {
    grid.replaceChildren();
    const groups = new Map();
    for (const name of metricNames().filter((each) => each.includes(view.filter))) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    for (const [group, names] of groups) grid.append(element("h2", {}, group), element("div", { class: "grid" }, names.map((name) => metricBox(name))));
  };
  const axis = element("select", { title: "horizontal axis", "aria-label": "horizontal axis", onchange: (event) => { view.axis = event.target.value; show(); } },
    Object.entries(AXES).map(([name, label]) => element("option", { value: name, selected: name === view.axis }, label)));
  const smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, onchange: (event) => { view.smoothing = Number(event.target.value); show(); } });
  const filter = element("input", { type: "search", id: "search", placeholder: "metric", "aria-label": "metric", value: view.filter, oninput: (event) => { view.filter = event.target.value; show(); } });
  main.append(element("div", { class: "bar" }, filter, element("label", {}, "axis ", axis), element("label", {}, "smoothing ", smooth)), grid);
  show();
});

addPage("validation", "Validation", (main) => {
  for (const run of report.data.runs) {
    main.append(element("h2", {}, run.name));
    if (!run.validation.length) { main.append(element("p", {}, "There are no two validations to compare.")); continue; }
    main.append(table(["metric", "first", "last", "change", "95 % interval"], run.validation.map(([name, before, after, half]) => {
      const change = after - before, clear = half !== null && Math.abs(change) > half;
      return [name, before.toFixed(3), after.toFixed(3),
        element("span", { class: clear ? (change > 0 ? "good" : "bad") : "" }, `${change >= 0 ? "+" : ""}${change.toFixed(3)}`),
        half === null ? "none" : `${(change - half).toFixed(3)} to ${(change + half).toFixed(3)}`];
    }), 1), element("p", { class: "quiet" }, "The intervals take the validations as independent; the page Compare pairs them by task. For each validation that has left its responses, the number of tasks enters by the t distribution; for others many are assumed. There is none without a standard error, or where all tasks are equal."));
  }
  const names = metricNames().filter((name) => /^(val|eval)\//.test(name) && !name.endsWith("_stderr"));
  main.append(element("div", { class: "grid" }, names.map((name) => metricBox(name))));
});

// Areas one upon the other; the first name lies at the bottom.
function drawStacked(box, run, names, height = 260) {
  const timed = run.metrics.step.map((_, place) => place).filter((place) => names.some((name) => run.metrics[name][place] !== null));
  const columns = names.map((name) => timed.map((place) => run.metrics[name][place] ?? 0));
  const sums = [];
  columns.forEach((column, number) => sums.push(column.map((value, place) => value + (number ? sums[number - 1][place] : 0))));
  const order = names.map((_, number) => names.length - 1 - number);
  const hue = (number) => HUES[number % HUES.length];
  draw(box, [timed.map((place) => axisOf(run)[place]), ...order.map((number) => sums[number])],
    order.map((number) => ({ label: `up to ${names[number]}`, color: hue(number), width: 1, fill: hue(number), quiet: true })), { height, legend: false, zero: true });
  box.append(element("p", {}, names.map((name, number) => [element("span", { class: "entry" }, element("span", { class: "swatch", style: `background:${hue(number)}` }), ` ${name}`), "  "]).flat()));
}

addPage("times", "Times", (main) => {
  for (const run of report.data.runs) {
    const names = Object.keys(run.metrics).filter((name) => /^time\/.+_s$/.test(name) && !name.endsWith("_cpu_s") && name !== "time/step_s");
    if (!names.length) { main.append(element("p", {}, `${run.name} has no times.`)); continue; }
    const total = (name) => run.metrics[name].reduce((sum, value) => sum + (value ?? 0), 0);
    names.sort((one, two) => total(two) - total(one));
    const all = names.reduce((sum, name) => sum + total(name), 0);
    const box = element("div", { class: "plot" }, element("h3", {}, `${run.name}: seconds of every step by phase`));
    main.append(box);
    whenVisible(box, () => drawStacked(box, run, names));
    main.append(table(["phase", "seconds", "share"], names.map((name) => [name, total(name).toFixed(1), `${(100 * total(name) / all).toFixed(1)} %`]), 1));
  }
  const more = metricNames().filter((name) => /^(perf|memory)\//.test(name));
  main.append(element("div", { class: "grid" }, more.map((name) => metricBox(name))));
});

function drawQuantiles(box, run, rows) {
  const xs = [], columns = [[], [], [], [], []];
  run.rollouts.steps.forEach((step, place) => {
    const x = at(run, step);
    if (!rows[place].length || x === undefined) return;
    xs.push(x);
    rows[place].forEach((value, number) => columns[number].push(value));
  });
  const hue = HUES[0], names = ["10 %", "25 %", "median", "75 %", "90 %"];
  draw(box, [xs, ...columns], names.map((label, number) => ({ label, color: number === 2 ? hue : `${hue}66`, width: number === 2 ? 2 : 1, quiet: number !== 2 })),
    { bands: [{ series: [5, 1], fill: `${hue}22` }, { series: [4, 2], fill: `${hue}33` }], marks: marksOf(run) });
}

const DISTRIBUTED = ["reward", "tools", "staleness", "engine", "correction", "filter"];
const OUTCOMES = ["success", "user_error", "timeout", "unavailable"].map((status) => `tools/${status}`);

// Shares of the tool calls by outcome.
function outcomesBox(run) {
  const names = OUTCOMES.filter((name) => run.metrics[name]);
  if (!names.length) return null;
  const box = element("div", { class: "plot", "data-outcomes": true }, element("h3", {}, "outcomes of tool calls"));
  whenVisible(box, () => drawStacked(box, run, names, 180));
  return box;
}

addPage("distributions", "Distributions", (main) => {
  const titles = { reward: "reward of a rollout", num_tokens: "response length in tokens", turns: "assistant turns" };
  for (const run of report.data.runs) {
    main.append(element("h2", {}, run.name), element("p", { class: "quiet" }, `Quantiles by step, over ${counted(run.rollouts.read, "rollout")}: ${run.rollouts.left_out.some((rule) => rule.startsWith("of every step")) ? "the first ones of every step" : "all of every step"}.`));
    main.append(element("div", { class: "grid" }, Object.entries(titles).map(([name, title]) => {
      const box = element("div", { class: "plot" }, element("h3", {}, title));
      whenVisible(box, () => drawQuantiles(box, run, run.rollouts.quantiles[name]));
      return box;
    }), outcomesBox(run)));
  }
  const parts = DISTRIBUTED.flatMap((family) => metricNames().filter((name) => name.startsWith(`${family}/`)));
  main.append(element("h2", {}, "Reward parts, tools, staleness, difference of engine and trainer"), element("div", { class: "grid" }, parts.map((name) => metricBox(name))));
});
