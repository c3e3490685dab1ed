// The sum of many answers: images by class, a filter, what another threshold would refuse, and CSV.

import { $, count, make, percent, refill } from "./elements.js";

const FEW = 8; // answers that need no sum
const UNKNOWN = "", FAILED = null; // kinds beside the names of classes
const COLUMNS = ["filename", "label", "score", "unknown", "unknown_score", "version", "error"];
const FORMULA = /^[\s]*[=+\-@]|^[\t\r]/; // what a spreadsheet would compute

const told = new Map(); // by row of the page: the columns, and the kind
let only; // the kind that is shown; undefined: all

/** Count an answer, or the reason why there is none. */
export function addToTally(row, { prediction, version, file, error }) {
  const kind = error ? FAILED : prediction.unknown ? UNKNOWN : prediction.label;
  const facts = prediction ? { ...prediction, version } : {};
  told.set(row, { kind, facts: { ...facts, filename: file.name, error: error ?? "" } });
}

/** Show the sum of the answers that are still on the page. */
export function showTally() {
  for (const row of told.keys()) if (!row.isConnected) told.delete(row);
  const sums = new Map();
  for (const { kind } of told.values()) sums.set(kind, (sums.get(kind) ?? 0) + 1);
  if (!sums.has(only)) only = undefined;
  $("tally").hidden = told.size <= FEW;
  const kinds = [...sums].sort(([, one], [, other]) => other - one);
  refill($("tally-kinds"), kinds.map(([kind, images], place) => chip(kind, images, place)));
  const doubts = [...told.values()].map(({ facts }) => facts.unknown_score).filter((doubt) => typeof doubt === "number");
  $("tally-doubt").hidden = !doubts.length;
  const from = Number($("tally-from").value) / 100;
  $("tally-refused").textContent = `${percent(from, 0)} sure: ${doubts.filter((doubt) => doubt > from).length} of ${count(doubts.length, "image", "images")}`;
  for (const [row, { kind, facts }] of told) {
    row.hidden = only !== undefined && kind !== only;
    row.classList.toggle("doubted", !$("tally").hidden && $("tally-doubt").open && facts.unknown_score > from);
  }
}

function chip(kind, images, place) {
  const button = make("button", kind ? "" : "warn");
  button.type = "button";
  button.id = `tally-${place}`;
  button.setAttribute("aria-pressed", String(only === kind));
  button.append(make("bdi", "", kind ?? "No answer"), ` ${images}`);
  if (kind === UNKNOWN) button.firstChild.textContent = "Unknown";
  button.addEventListener("click", () => {
    only = only === kind ? undefined : kind;
    showTally();
  });
  return button;
}

function cell(value) {
  const text = value === undefined || value === null ? "" : String(value);
  const safe = typeof value === "string" && FORMULA.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

$("tally-csv").addEventListener("click", () => {
  const order = new Map([...$("answers").children].map((row, place) => [row, place]));
  const rows = [...told].sort(([one], [other]) => order.get(one) - order.get(other));
  const lines = [COLUMNS, ...rows.map(([, { facts }]) => COLUMNS.map((name) => facts[name]))];
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([lines.map((line) => `${line.map(cell).join(",")}\r\n`).join("")], { type: "text/csv" }));
  link.download = "answers.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
});
for (const [id, event] of [["tally-from", "input"], ["tally-doubt", "toggle"]]) $(id).addEventListener(event, showTally);
