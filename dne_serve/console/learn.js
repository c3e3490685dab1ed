// The Learn part of the page at /label: labels that wait, the progress of a job, and its verdict.

import { showAdvice } from "./advice.js";
import { ADMIN_TOKEN, LABEL_TOKEN, READ_TOKEN, ask, token } from "./ask.js";
import { $, count, line, make, percent, refill, show, size } from "./elements.js";
import { openMove } from "./moves.js";

const REFRESH_MS = 5000;
const PROGRESS_MS = 1000;
const MAX_CHIPS = 30;
const ADAPTED = "Adapted to all classes";
const ENDED = new Set(["promoted", "refused", "failed", "cancelled"]);
const SAID = {
  waiting: "Waiting for a worker. dne-serve --with-trainer has one, and dne-train worker is one.",
  lost: "The worker gives no sign of life. The next one goes on.",
  cancelling: "Stopping…",
};

let job = null; // the newest job
let head; // the version that the channel names; null: none
const unfolded = new Set(); // versions whose verdict somebody has opened
let turn = 0; // numbers the looks, so that only the newest one goes on

const bearer = () => token(LABEL_TOKEN) || token(READ_TOKEN) || token(ADMIN_TOKEN);
const runs = () => job !== null && !ENDED.has(job.state);

/** Look at the jobs, show them, and look again in a while. */
async function keepLooking() {
  const mine = ++turn;
  try {
    if (!document.hidden) await look();
    show($("learn-error"), "");
  } catch (error) {
    $("learn").hidden = error.refused;
    show($("learn-error"), error.refused ? "" : error.message);
  }
  if (mine === turn) setTimeout(() => mine === turn && keepLooking(), runs() ? PROGRESS_MS : REFRESH_MS);
}

async function look() {
  if (runs()) {
    job = await ask(`jobs/${job.id}`, { bearer: bearer() });
    showJob();
    if (runs()) return;
  }
  const answer = await ask("jobs?limit=1", { bearer: bearer() });
  [job = null] = answer.jobs;
  if (head !== undefined && head !== answer.head) document.dispatchEvent(new CustomEvent("head", { detail: answer.head }));
  head = answer.head;
  $("learn").hidden = false;
  showWaiting(answer.waiting);
  showBackbones(head === null ? answer.backbones : null);
  $("learn-go").hidden = Boolean(answer.refused);
  show($("learn-refused"), answer.refused ? `Learning cannot be asked for from this page: ${answer.refused}. dne-train add-task --from-inbox learns from the labels.` : "");
  show($("learn-pinned"), answer.pinned ? `The channel stays at version ${head} after a rollback: what is learnt is published, and not served until somebody promotes it or resumes.` : "");
  showJob();
  await showAdvice(head, bearer());
}

// What a first task begins with

const BY_NAME = "by name";
let backbones = null;

function showBackbones(found) {
  $("begin").hidden = found === null;
  $("teach-box").open ||= found !== null && backbones === null; // there is no version yet: begin here
  if (found === null || JSON.stringify(found) === JSON.stringify(backbones)) return;
  backbones = found;
  const known = found.map(({ name, cached, megabytes }) => [name, `${name} (${cached ? "on this machine" : `${megabytes} MB to fetch`})`]);
  const others = [[BY_NAME, "weights by their name…"], ["", "nothing: learn from scratch"]];
  $("backbone").replaceChildren(...[...known, ...others].map(([value, text]) => Object.assign(make("option", "", text), { value })));
  tellBackbone();
}

function tellBackbone() {
  const chosen = $("backbone").value;
  const one = backbones.find(({ name }) => name === chosen);
  $("backbone-name").hidden = chosen !== BY_NAME;
  $("backbone-about").textContent = one ? `For ${one.good_for}. Licence: ${one.licence ?? "not known"}.` : chosen ? "A known name, or owner/name on the Hugging Face Hub." : "For many images that look like no photo; it takes long.";
}

function chosenBackbone() {
  if (head !== null || backbones === null) return {};
  const chosen = $("backbone").value === BY_NAME ? $("backbone-name").value.trim() : $("backbone").value;
  return chosen ? { pretrained: chosen } : {};
}

function showWaiting({ known, new: fresh, left, corrections }) {
  const moves = corrections.filter(({ why }) => why === null);
  refill($("learn-corrections"), corrections.slice(0, MAX_CHIPS).map(({ label, to, actor, why }) => line("li", "", [to === null ? `an image of ${label} is taken out` : `an image of ${label} is ${to}`, `by ${actor}`, why])));
  const images = [...known, ...fresh].reduce((sum, one) => sum + one.images, 0);
  const parts = [`${count(images, "label waits", "labels wait")} for learning`];
  if (fresh.length) parts.push(count(fresh.length, "new class", "new classes"));
  if (known.length) parts.push(`more images of ${count(known.length, "known class", "known classes")}`);
  const first = moves.length ? [count(moves.length, "correction waits", "corrections wait")] : [];
  const told = [...first, ...(images ? parts : [])];
  $("learn-waiting").textContent = told.length ? `${told.join(" · ")}.` : "No label waits for learning.";
  const chips = [...fresh.map((one) => chip(one, "new")), ...known.map((one) => chip(one, ""))];
  refill($("learn-classes"), chips.slice(0, MAX_CHIPS));
  if (chips.length > MAX_CHIPS) $("learn-classes").append(make("li", "", `${chips.length - MAX_CHIPS} more`));
  refill($("learn-left"), left.map((one) => line("li", "", [one.label, one.why])));
  $("learn-go").disabled = told.length === 0 || runs();
}

function chip({ label, images }, kind) {
  const element = make("li", kind);
  element.append(make("bdi", "", label), make("span", "value", String(images)));
  if (kind) element.title = "A new class";
  return element;
}

function showJob() {
  const running = runs();
  $("learn-progress").hidden = !running;
  $("verdict").hidden = running || job === null;
  $("learn-log").hidden = !job?.log.length;
  if (job === null) return;
  $("learn-log-lines").textContent = job.log.join("\n");
  if (running) {
    $("learn-go").disabled = true;
    showProgress();
  } else {
    refill($("verdict"), verdict());
  }
}

function showProgress() {
  const known = job.state === "running" && job.share !== null;
  if (known) $("learn-bar").value = job.share;
  else $("learn-bar").removeAttribute("value");
  const left = job.seconds_left === null ? "" : `, about ${Math.ceil(job.seconds_left)} s left`;
  const share = known ? `: ${Math.round(100 * job.share)} %${left}` : "";
  const text = SAID[job.state] ?? `${job.phase ?? "beginning"}${share}`;
  if ($("learn-phase").textContent !== text) $("learn-phase").textContent = text;
  $("learn-cancel").disabled = job.state === "cancelling";
}

// The verdict

function verdict() {
  const parts = job.versions.flatMap(aboutVersion);
  if (job.state === "failed") parts.push(make("p", "error", `Nothing was promoted: ${job.said}`));
  if (job.state === "cancelled") parts.push(make("p", "", "Learning was cancelled."));
  const last = job.versions.at(-1);
  if (last?.promoted && head === last.version && job.before !== null) parts.push(backButton());
  return parts;
}

function aboutVersion(one) {
  const since = head === one.version ? "" : `; version ${head} is served now`;
  const title = one.promoted ? `Version ${one.version} was promoted${since}` : `Version ${one.version} was not promoted`;
  const names = line("p", "about", one.new_classes.length ? one.new_classes : one.extended);
  names.prepend(one.corrected ? `${count(one.corrected, "image", "images")} corrected of: ` : one.new_classes.length ? "New: " : one.extended.length ? "More images of: " : ADAPTED);
  const summary = make("summary");
  summary.id = `verdict-${one.version}`;
  summary.append(make("h3", one.promoted ? "good" : "bad", title));
  const box = make("details");
  box.open = unfolded.has(one.version);
  box.addEventListener("toggle", () => (box.open ? unfolded.add(one.version) : unfolded.delete(one.version)));
  box.append(summary, names, ...[
    measured("Old classes, before", one.old_before),
    measured("Old classes, now", one.old_after),
    names.textContent === ADAPTED ? null : measured(one.extended.length ? "Extended classes" : "New classes", one.new_after),
  ].filter(Boolean), make("p", "about", `${one.verdict} · + ${size(one.delta_bytes)}`));
  const facts = [box];
  if (one.refused) facts.push(make("p", "error", `Refused: ${one.refused}`));
  if (!one.promoted && head !== one.version) facts.push(promoteButton(one));
  return facts;
}

function measured(what, found) {
  if (!found) return null;
  return line("p", "measured", [`${what}: ${percent(found.share)}`, `${percent(found.low)} to ${percent(found.high)} likely`, count(found.images, "image", "images")]);
}

function promoteButton(one) {
  const button = make("button", "danger", "Promote anyway…");
  button.type = "button";
  button.id = `promote-${one.version}`;
  const reasons = one.reasons.length ? one.reasons : [one.refused ?? "it was not promoted"];
  const title = `Promote version ${one.version} although refused`;
  button.addEventListener("click", () => openMove({ path: "promote", to: one.version, title, verb: "Promote", refused: true, reasons }));
  return button;
}

function backButton() {
  const button = make("button", "", `Roll back to version ${job.before}`);
  button.type = "button";
  button.id = "roll-back";
  button.addEventListener("click", () => moveNow("rollback", { to: job.before, reason: `after job ${job.id}` }, { title: `Roll back to version ${job.before}`, verb: "Roll back" }));
  return button;
}

/** Ask at once with the admin token that is known, else in the dialog that asks for one. */
async function moveNow(path, body, dialog) {
  const known = token(ADMIN_TOKEN);
  if (!known) {
    openMove({ path, to: body.to, ...dialog });
    return;
  }
  try {
    await ask(path, { method: "POST", bearer: known, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
    await keepLooking();
  } catch (error) {
    if (error.refused) openMove({ path, to: body.to, ...dialog });
    else show($("learn-error"), error.message);
  }
}

$("learn-go").addEventListener("click", () => openMove({ path: "jobs", title: "Learn from the labels", verb: "Learn", ...chosenBackbone() }));
$("backbone").addEventListener("change", tellBackbone);
$("learn-cancel").addEventListener("click", () => moveNow(`jobs/${job.id}/cancel`, {}, { title: "Cancel learning", verb: "Cancel learning" }));
for (const event of ["moved", "labelled", "token"]) document.addEventListener(event, keepLooking);
keepLooking();
