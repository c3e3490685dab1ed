// The live view: server-sent events of GET /live. They are read with fetch, because an EventSource
// cannot send a token. Nothing is asked while the view is closed or the page is hidden.

import { READ_TOKEN, token } from "./ask.js";
import { $, count, make, percent, refill, show } from "./elements.js";
import { pause } from "./offline.js";
import { bar } from "./predict.js";

const SILENCE_MS = 15_000; // a server says something every five seconds
const WIDE = "(min-width: 46rem)";
const NUDGES = [
  [document, "token"],
  [document, "server-back"],
  [document, "visibilitychange"],
  [$("live"), "toggle"],
];

let facts = {};
let heard = null; // when the last event came
let listening = null; // the AbortController of the stream

const wanted = () => $("live").open && !document.hidden;

/** Listen for ever, with a pause after each end that grows with the failures. */
async function follow() {
  for (let failures = 0; ; ) {
    if (!wanted()) {
      await nudge();
      continue;
    }
    try {
      await listen(() => {
        failures = 0;
      });
    } catch (error) {
      if (error.name !== "AbortError") show($("live-note"), error.message || outOfDate());
      if (error.locked) await nudge();
    }
    if (wanted()) await Promise.race([nudge(), new Promise((resolve) => setTimeout(resolve, pause(failures)))]);
    failures += 1;
  }
}

/** Wait until something happens after which another try makes sense. */
function nudge() {
  return new Promise((resolve) => {
    const heard = new AbortController();
    const done = () => {
      heard.abort();
      resolve();
    };
    for (const [target, name] of NUDGES) target.addEventListener(name, done, { signal: heard.signal });
  });
}

async function listen(onEvent) {
  const controller = new AbortController();
  listening = controller;
  let silence = setTimeout(() => controller.abort(), SILENCE_MS);
  try {
    const answer = await open(controller.signal);
    facts = {};
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", part = await reader.read(); !part.done; part = await reader.read()) {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(), SILENCE_MS);
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      events.forEach(take);
      onEvent();
    }
  } finally {
    clearTimeout(silence);
    listening = null;
  }
}

async function open(signal) {
  const bearer = token(READ_TOKEN);
  const headers = { Accept: "text/event-stream", ...(bearer ? { Authorization: `Bearer ${bearer}` } : {}) };
  let answer;
  try {
    answer = await fetch("live", { headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    document.dispatchEvent(new Event("unreachable"));
    throw new Error("");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  const locked = answer.status === 401 || answer.status === 403;
  const why = locked ? "The live view needs a token with the scope read." : problem.detail;
  throw Object.assign(new Error(why || `The server answered ${answer.status}.`), { locked });
}

/** Say of when the figures are that stay on the page. */
function outOfDate() {
  return heard ? `Not connected. These figures are of ${heard.toLocaleTimeString()}.` : "Not connected.";
}

function take(event) {
  if (!event.startsWith("data: ")) return;
  Object.assign(facts, JSON.parse(event.slice("data: ".length)));
  heard = new Date();
  show($("live-note"), "");
  tellAll();
}

// What is shown

function tellAll() {
  const { answers } = facts;
  $("live-tiles").replaceChildren(...tiles().map(tile));
  const named = answers?.classes ?? [];
  const rows = named.map(({ label, images }) => ({ label, score: images / answers.images }));
  if (answers?.others) rows.push({ label: "other classes", score: answers.others / answers.images });
  refill($("live-classes"), rows.map(bar));
  const asked = answers ? `Answers of version ${facts.version} by class, of its last ${count(answers.images, "image", "images")}:` : facts.version ? "Nothing has been asked of this version yet." : "No version is served yet.";
  show($("live-asked"), asked);
}

function tiles() {
  const { answers, swap, canary, shadow } = facts;
  const failed = facts.failed && facts.version !== null ? [["Failed", percent(facts.failed), "of the last minute's requests", true]] : [];
  return [
    ["Requests", `${number(facts.requests_per_second)}/s`, "predictions"],
    ["p50", milliseconds(facts.p50_ms), "of the last minute"],
    ["p99", milliseconds(facts.p99_ms), "of the last minute"],
    ...failed,
    ["Unknown", answers ? percent(answers.unknown / answers.images) : "–", "like no class"],
    ["Queue", String(facts.queue), `of ${facts.queue_limit} images`, facts.queue > 0.8 * facts.queue_limit],
    ["Last swap", swap ? `version ${swap.version}` : "–", swap ? clock(swap.time) : "none yet"],
    ...drift(answers),
    ...beside("Canary", canary),
    ...beside("Shadow", shadow),
  ];
}

const drift = (answers) =>
  [
    ["Drift of classes", answers?.drift_classes],
    ["Drift of scores", answers?.drift_scores],
  ]
    .filter(([, index]) => index !== null && index !== undefined)
    .map(([name, index]) => [name, index.toFixed(2), index > 0.25 ? "large, from the held-out images" : "from the held-out images", index > 0.25]);

function beside(name, one) {
  if (!one) return [];
  const compared = one.same + one.other;
  const version = one.share ? `version ${one.version} for ${percent(one.share)}` : `version ${one.version}`;
  if (!compared && one.answered) return [[name, count(one.answered, "image", "images"), `${version}, not compared`]];
  const agreed = compared ? `${percent(one.same / compared)} same` : "–";
  return [[name, agreed, `${version}, ${count(compared, "image", "images")}`]];
}

function tile([name, value, about, bad]) {
  const box = make("div", bad ? "figure bad" : "figure");
  const said = make("dd", "", value);
  said.append(make("span", "about", about));
  box.append(make("dt", "", name), said);
  return box;
}

const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString());
const milliseconds = (ms) => (ms === null ? "–" : `${number(ms)}\u00a0ms`);
const clock = (time) => new Date(1000 * time).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });

function stop() {
  if (!wanted()) listening?.abort();
}

$("live").open = matchMedia(WIDE).matches; // on a phone, predicting comes first
$("live").addEventListener("toggle", stop);
document.addEventListener("visibilitychange", stop);
follow();
