// The page at / of a server with many models: their list. The page of each stands below models/NAME/.

import { ask, keepToken, READ_TOKEN } from "./ask.js";
import { $, count, make, refill, show, when } from "./elements.js";
import { pause } from "./offline.js";

const REFRESH_MS = 5000;
const PAGE = 100; // models that are asked for at a time
const SVG = $("drawing").namespaceURI; // the page has an empty drawing

let shown = PAGE; // models that somebody asked to see
let failures = 0;
let locked = false; // a token is missing: asking again would be one wrong guess more
let asked = 0; // only the newest question is answered on the page

async function list() {
  if (locked) return;
  const question = ++asked;
  const search = $("search").value.trim();
  try {
    const page = await ask(`models?${new URLSearchParams({ search, limit: Math.min(shown, 1000) })}`);
    failures = 0;
    if (question === asked) fill(page);
  } catch (error) {
    failures += error.unreachable ? 1 : 0;
    if (error.refused) {
      locked = true;
      $("door").hidden = false;
    }
    setState(error.message, true);
  }
}

function fill(page) {
  setState(count(page.total, "model", "models") + (page.default ? ` · ${page.default} answers where none is named` : ""));
  refill($("rows"), page.models.map(row));
  $("models").hidden = page.models.length === 0;
  show($("none"), page.models.length ? "" : $("search").value ? "No model has such a name." : "There is no store yet: dne-train add-task --store makes one in this folder.");
  $("more").hidden = page.next_after === null || shown >= 1000;
}

function row(model) {
  const line = make("tr");
  const name = make("th");
  name.scope = "row";
  name.className = "name";
  const link = make("a", "", model.name);
  link.href = `models/${encodeURIComponent(model.name)}/`;
  link.id = `model-${model.name}`;
  name.append(link);
  const state = make("td", model.error ? "bad" : "", model.error ?? (model.loaded ? "answers" : "not in memory"));
  line.append(name, state, number(model.version), number(model.classes), make("td", "", model.last_use ? when(model.last_use) : ""));
  const use = make("td");
  if (model.minutes.length) use.append(spark(model.minutes));
  line.append(use);
  return line;
}

const number = (value) => make("td", "number", value ?? "");

/** Draw the requests of each minute as bars. */
function spark(minutes) {
  const most = Math.max(1, ...minutes);
  const total = minutes.reduce((sum, n) => sum + n, 0);
  const svg = document.createElementNS(SVG, "svg");
  const facts = { width: 4 * minutes.length, height: 20, role: "img", "aria-label": count(total, "request", "requests") };
  for (const [key, value] of Object.entries(facts)) svg.setAttribute(key, value);
  minutes.forEach((n, i) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = n ? Math.max(2, Math.round((20 * n) / most)) : 0;
    for (const [key, value] of Object.entries({ x: 4 * i, y: 20 - height, width: 3, height })) bar.setAttribute(key, value);
    svg.append(bar);
  });
  return svg;
}

function setState(text, bad) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", Boolean(bad));
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(READ_TOKEN, $("door-token").value.trim());
  locked = false;
  $("door").hidden = true;
  list();
});
$("search").addEventListener("input", () => {
  shown = PAGE;
  list();
});
$("more").addEventListener("click", () => {
  shown += PAGE;
  list();
});

async function keepFresh() {
  if (!document.hidden) await list();
  setTimeout(keepFresh, failures ? pause(failures) : REFRESH_MS);
}
keepFresh();
