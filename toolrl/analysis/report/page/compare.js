"use strict";
// What differs between runs, paired differences of validations, and tasks whose outcome flipped.
const KINDS = { settings: "Settings", data: "Data files", code: "Code and packages" };

function showDifferences(main) {
  const { runs, differences } = report.data;
  if (runs.length < 2) return;
  main.append(element("h2", {}, "What differs between the runs"));
  for (const [kind, title] of Object.entries(KINDS)) {
    const rows = differences[kind], known = runs.every((run) => run.known[kind]);
    main.append(element("h3", {}, title));
    if (rows.length) main.append(table(["name", ...runs.map((run) => run.name)], rows.map(([name, ...values]) => [name, ...values.map((value) => (value === null ? "–" : shown(value)))])));
    else main.append(element("p", { class: "quiet" }, known ? "No difference." : "Not all of the runs have left a record of it."));
  }
}

function pairedTable(comparison) {
  const signed = (value) => `${value >= 0 ? "+" : ""}${value.toFixed(3)}`;
  return table(["set", "tasks", comparison.before, comparison.after, "paired difference", "95 % interval", "solved", "gained", "lost"],
    comparison.sets.map((set) => [set.name, set.tasks, set.before.toFixed(3), set.after.toFixed(3),
      element("span", { class: set.low > 0 ? "good" : set.high < 0 ? "bad" : "" }, signed(set.after - set.before)),
      set.low === null ? "none" : `${signed(set.low)} to ${signed(set.high)}`, set.solved.join(" → "), set.gained, set.lost]), 1);
}

// The transcripts of both sides beside each other, for the chosen task.
function flippedViewer(comparison) {
  const right = element("div", { class: "beside" }), list = element("div", { class: "list", role: "group", "aria-label": "flipped tasks" });
  const select = async (one, item) => {
    list.querySelectorAll(".item").forEach((other) => other.setAttribute("aria-current", String(other === item)));
    const sides = await chunk(one.chunk), names = [comparison.before, comparison.after];
    right.replaceChildren(...sides.map((side, place) => element("article", { class: "flipped" },
      element("h3", {}, `${names[place]}: reward ${shown(one.rewards[place])}`),
      element("p", { class: "quiet" }, `${one.set} · ${one.task}${side.num_responses > 1 ? ` · response ${side.response} of ${side.num_responses}` : ""}`), dialogue(side))));
  };
  comparison.flipped.forEach((one) => {
    const item = element("button", { class: "item", onclick: () => select(one, item) },
      element("span", { class: one.solved ? "good" : "bad" }, `${one.solved ? "gained" : "lost"}: ${one.rewards.map((value) => shown(value, 3)).join(" → ")}`),
      element("small", {}, `${one.set} ${one.task}`));
    list.append(item);
  });
  select(comparison.flipped[0], list.firstChild);
  return element("div", { class: "viewer" }, list, right);
}

addPage("compare", "Compare", (main) => {
  const state = () => JSON.stringify([report.data.comparisons, report.data.differences]), before = state();
  report.pages.find((page) => page.id === "compare").refresh = () => state() === before; // stays as it is
  showDifferences(main);
  const { comparisons } = report.data;
  if (!comparisons.length) main.append(element("p", {}, "No two validations have left their responses."));
  for (const comparison of comparisons) {
    main.append(element("h2", {}, `${comparison.before} and ${comparison.after}`));
    if (!comparison.sets.length) { main.append(element("p", {}, "They have no task in common.")); continue; }
    main.append(pairedTable(comparison));
    if (comparison.unpaired) main.append(element("p", { class: "quiet" }, `Left out: ${counted(comparison.unpaired, "task")} without a counterpart that has the same prompt and answer.`));
    const shownTasks = comparison.flipped.length, every = shownTasks + comparison.left_out;
    if (every) main.append(element("h3", {}, `Tasks whose outcome flipped${comparison.left_out ? `: ${every}, of which ${shownTasks} fit into the file` : ""}`));
    if (shownTasks) main.append(flippedViewer(comparison));
  }
  main.append(element("p", { class: "quiet" }, "Intervals: bootstrap over the tasks; of fewer than 30 by the t distribution. None where all differences are equal. Solved: half of the responses have the maximum reward, or a positive one where the reward defines no maximum."));
});
