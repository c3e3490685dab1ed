// Make the lines about a version in the list: accuracies, sizes, gate, promotion, and its report.

import { count, line, make, percent, size, when } from "./elements.js";

const opened = new Map(); // what a person did to the details of a version: true for opened

/** Make the lines about a version; `move` is the newest record of the channel that names it, and
 * `open` whether its details are shown unless a person closes them. */
export function versionFacts(one, { move, open }) {
  return [short(one), ...reasons(one), details(one, move, open)];
}

function facts(said) {
  const element = make("p");
  said.forEach((fact, i) => element.append(i ? " · " : "", make("span", "fact", fact)));
  return element;
}

function short(one) {
  const said = one.accuracy.all === null ? [] : [`accuracy ${percent(one.accuracy.all)}`];
  if (one.parent !== null && one.parent !== one.version - 1) said.push(`built on version ${one.parent}`);
  said.push(one.delta_bytes ? `+ ${size(one.delta_bytes)}` : "no new weights", when(one.created));
  return facts(said);
}

function details(one, move, open) {
  const box = make("details", "more");
  box.open = opened.get(one.version) ?? open;
  const summary = make("summary", "", "Details");
  summary.id = `details-${one.version}`;
  summary.setAttribute("aria-label", `Details of version ${one.version}`);
  // A click comes before the change; a toggle event would come for those that open by themselves too.
  summary.addEventListener("click", () => opened.set(one.version, !box.open));
  box.append(summary, ...shares(one), costs(one), ...promoted(move));
  return box;
}

function shares(one) {
  const { all, old, new: fresh, parent_old: before } = one.accuracy;
  if (all === null) return [];
  const list = make("dl", "shares");
  const add = (name, share, range, more = "") => {
    if (share === null) return;
    const part = make("div");
    part.append(make("dt", "", name), make("dd", "", percent(share)));
    if (range) part.append(make("dd", "range", `${(100 * range[0]).toFixed(0)} to ${percent(range[1], 0)}`));
    if (more) part.append(make("dd", "range", more));
    list.append(part);
  };
  add("all", all, one.likely.all);
  add("old", old, one.likely.old, before === null ? "" : `before ${percent(before)}`);
  add("new", fresh, one.likely.new);
  return [list];
}

function costs(one) {
  const said = [`${count(one.classes, "class", "classes")} in ${count(one.tasks, "task", "tasks")}`, `${size(one.total_bytes)} in all`];
  if (one.gate === "passed") said.push("passed the gate");
  if (one.gate === "not judged") said.push(one.verdict);
  return facts(said);
}

function promoted(move) {
  if (!move) return [];
  const did = move.mode === "pin" ? "Rolled back to" : "Promoted";
  return [line("p", "moved", [`${did} by ${move.actor}`, when(move.time), move.reason])];
}

function reasons(one) {
  if (!one.reasons.length) return [];
  const list = make("ul", "reasons");
  list.setAttribute("aria-label", `Why the gate refused version ${one.version}`);
  list.append(...one.reasons.map((reason) => make("li", "", reason)));
  return [list];
}

/** Make the link to the report of a version. */
export function reportLink(one) {
  const link = make("a", "report-link", "Report");
  link.href = `versions/${one.version}/report`;
  link.setAttribute("aria-label", `Report of version ${one.version}`);
  return link;
}
