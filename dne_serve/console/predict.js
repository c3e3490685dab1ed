// Predictions: any number of images, sent in groups, one group at a time.

import { READ_TOKEN, ask, keepToken } from "./ask.js";
import { addOther, beginComparing, otherAnswer } from "./compare.js";
import { entriesOf, filesIn, isImage, onDrop } from "./dropped.js";
import { $, count, line, make, percent, seconds, show, sleep } from "./elements.js";
import { addToTally, showTally } from "./tally.js";
import { whyBox } from "./why.js";
import { wrongBox } from "./wrong.js";

const GROUP_IMAGES = 8; // far below what a server takes at once, so that others get their turn
const GROUP_BYTES = 4 * 2 ** 20;
const TRIES = 5; // of a group that a busy server sends away
const LONGEST_WAIT_S = 10;
const KEPT = 200; // answers on the page
const TOP_K = 5;
const TICK_MS = 200;
const MOST_DROPPED = 2000; // files of folders
const BUSY = new Set([429, 503]);
// Statuses that speak of the images of a group, not of the server or of the person asking.
const ABOUT_IMAGES = new Set([400, 413, 415, 422]);

const waiting = [];
let run = null;

/** Ask about the files too, now or behind those that wait already. */
export function takeImages(items) {
  const files = [...items].filter((item) => item instanceof File);
  if (!files.length) return;
  waiting.push(...files);
  if (run) run.total += files.length;
  else work({ total: waiting.length, alone: 0, done: 0, bad: 0, began: performance.now(), last: null, note: "" });
}

async function work(started) {
  run = started;
  show($("predict-error"), "");
  beginComparing();
  const ticking = setInterval(tell, TICK_MS);
  tell();
  try {
    while (waiting.length) await answerGroup(nextGroup());
  } catch (error) {
    giveUp(error);
  } finally {
    clearInterval(ticking);
    run.ended = true;
    tell();
    run = null;
  }
}

function nextGroup() {
  const group = [waiting.shift()];
  let bytes = group[0].size;
  const most = run.alone ? 1 : GROUP_IMAGES;
  run.alone = Math.max(run.alone - 1, 0);
  while (waiting.length && group.length < most && bytes + waiting[0].size <= GROUP_BYTES) {
    bytes += waiting[0].size;
    group.push(waiting.shift());
  }
  return group;
}

/** Show the answers of a group. One bad image fails a request: then each is asked by itself. */
async function answerGroup(group) {
  try {
    const began = performance.now();
    const answer = await patiently(group);
    const took = group.length === 1 ? seconds(performance.now() - began) : "";
    const other = await otherAnswer(answer, (version) => patiently(group, version));
    put(answer.predictions.map((one, i) => answerRow(one, group[i], { version: answer.version, took }, other && { prediction: other.predictions[i], version: other.version })));
    run.done += group.length;
  } catch (error) {
    const isBad = ABOUT_IMAGES.has(error.status);
    if (isBad && group.length === 1) {
      put([failedRow(group[0], error.message)]);
      run.done += 1;
      run.bad += 1;
      return;
    }
    waiting.unshift(...group);
    if (!isBad) throw error;
    run.alone = group.length;
  }
}

/** Ask a group, and again while the server is busy: as often as TRIES, when it says. */
async function patiently(group, version = $("ask").value) {
  for (let tried = 1; ; tried += 1) {
    try {
      return await send(group, version);
    } catch (error) {
      if (!BUSY.has(error.status) || tried === TRIES || run.stopped) throw error;
      run.note = "the server is busy, trying again";
      await sleep(1000 * Math.min(error.retryAfter, LONGEST_WAIT_S));
      run.note = "";
    }
  }
}

function send(group, version) {
  const form = new FormData();
  for (const file of group) form.append("files", file, file.name);
  const query = new URLSearchParams({ top_k: TOP_K });
  if (version) query.set("version", version);
  return ask(`predict?${query}`, { method: "POST", body: form });
}

/** Say why the rest was not asked. Images wait for a token that is missing; others are let go. */
function giveUp(error) {
  if (error.refused) {
    askForToken(error.message);
    return;
  }
  const left = waiting.splice(0).length;
  show($("predict-error"), `${count(left, "image was", "images were")} not answered: ${error.message}`);
}

function tell() {
  const { done, total, began, note, ended = false, bad } = run;
  $("progress").hidden = ended;
  $("stop").hidden = ended || total <= GROUP_IMAGES;
  $("drop").setAttribute("aria-busy", String(!ended));
  $("progress-bar").max = total;
  $("progress-bar").value = done;
  const time = seconds(performance.now() - began);
  $("progress-text").textContent = [`${done} of ${count(total, "image", "images")}`, time, note].filter(Boolean).join(" · ");
  if (!ended) return;
  const shown = done > KEPT ? `; the last ${KEPT} are shown` : "";
  const refused = bad ? `, ${bad} refused` : "";
  const answered = `${done < total ? `${done} of ` : ""}${count(total, "image", "images")}`;
  show($("told"), done ? `${answered} in ${time}${refused}${shown}.` : "");
}

$("stop").addEventListener("click", () => {
  run.stopped = true;
  run.total -= waiting.splice(0).length;
});

// The door, where this server asks for a token

export function askForToken(why) {
  $("door").hidden = false;
  show($("door-error"), $("door").dataset.tried ? why : "");
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(READ_TOKEN, $("door-token").value);
  $("door").dataset.tried = "yes";
  $("door").hidden = true;
  show($("predict-error"), "");
  document.dispatchEvent(new Event("token"));
  takeImages(waiting.splice(0));
});

// Rows

/** Put the rows of a group behind those of the groups before it, above older runs. */
function put(rows) {
  if (run.last?.isConnected) run.last.after(...rows);
  else $("answers").prepend(...rows);
  run.last = rows.at(-1);
  const all = $("answers").children;
  $("answers").classList.toggle("many", all.length > GROUP_IMAGES && !$("answers").querySelector(".compared"));
  while (all.length > KEPT) (all[all.length - 1] === run.last ? all[0] : all[all.length - 1]).remove();
  showTally();
}

function answerRow(prediction, file, { version, took }, other) {
  const row = make("li", "answer");
  const box = answerBox(prediction, { version, took, isOpen: Boolean(other) || run.total <= GROUP_IMAGES });
  row.append(thumbnail(file), box);
  addToTally(row, { prediction, version, file });
  if (!other) box.append(whyBox(file, version), wrongBox(file));
  if (other) {
    const { prediction: second, version: otherVersion } = other;
    addOther(row, answerBox(second, { version: otherVersion, took: "", isOpen: true }), { first: prediction, second, versions: [version, otherVersion] });
  }
  return row;
}

/** Make the answer of one version. Of many images only the class is shown until one is opened. */
function answerBox(prediction, { version, took, isOpen }) {
  const box = make("div", prediction.unknown ? "unknown" : "");
  const doubt = prediction.unknown_score ?? null; // null: the version tells no probability
  const said = line("p", prediction.unknown ? "nearest" : "label", prediction.unknown ? [prediction.label] : [prediction.label, percent(prediction.score)]);
  if (prediction.unknown) {
    said.prepend("Closest class: ");
    box.append(make("p", "label", doubt === null ? "Unknown" : `Unknown (${percent(doubt)} sure)`));
  }
  const about = [`version ${version}`, `task ${prediction.task}`, took, prediction.filename];
  if (prediction.level) about.unshift(`a group: likeliest ${prediction.top[0].label}`);
  if (doubt !== null && !prediction.unknown) about.push(`none of these: ${percent(doubt)}`);
  const bars = make("div", "bars");
  bars.append(...prediction.top.map(bar));
  const detail = make("details", "detail");
  detail.open = isOpen;
  const summary = make("summary", "", "Details");
  summary.append(make("span", "visually-hidden", ` of ${prediction.filename}`));
  detail.append(summary, line("p", "about", about), bars);
  box.append(said, detail);
  return box;
}

function failedRow(file, why) {
  const row = make("li", "answer failed");
  const box = make("div");
  const said = why.replace(/^image 1 of 1 \((.+?)\): /, "$1: "); // it was asked by itself
  box.append(make("p", "label", "No answer"), make("p", "error", said));
  addToTally(row, { file, error: said });
  row.append(thumbnail(file), box);
  return row;
}

function thumbnail(file) {
  const image = make("img");
  image.alt = "";
  image.src = URL.createObjectURL(file);
  image.onload = () => {
    if (Math.max(image.naturalWidth, image.naturalHeight) < 64) image.classList.add("small");
    URL.revokeObjectURL(image.src);
  };
  image.onerror = () => {
    URL.revokeObjectURL(image.src);
    image.replaceWith(make("div", "no-picture", "no picture"));
  };
  return image;
}

export function bar({ label, score }) {
  const row = make("div", "bar");
  const name = make("span", "name", label);
  name.title = label;
  const track = make("div", "track");
  const fill = make("div", "fill");
  fill.style.width = `${100 * score}%`;
  track.append(fill);
  row.append(name, track, make("span", "value", percent(score)));
  return row;
}

// Ways in: choose, drop, paste, a camera

for (const input of [$("files"), $("shot")]) {
  input.addEventListener("change", () => {
    takeImages(input.files);
    input.value = ""; // so that the same file can be chosen again
  });
}
/** Ask about what was dropped; of folders, about the images in them. */
async function takeDropped(transfer) {
  const entries = entriesOf(transfer);
  if (!entries.some((entry) => entry.isDirectory)) {
    takeImages(transfer.files);
    return;
  }
  const { found, isCut } = await filesIn(entries, MOST_DROPPED);
  const files = found.slice(0, MOST_DROPPED).map(({ file }) => file);
  const images = files.filter(isImage);
  const left = files.length - images.length;
  const cut = isCut ? `Only the first ${MOST_DROPPED} files were taken. ` : "";
  takeImages(images);
  show($("predict-error"), cut + (left ? `${count(left, "file that is not an image was", "files that are not images were")} left out.` : ""));
}

onDrop($("drop"), takeDropped);
document.addEventListener("paste", (event) => takeImages(event.clipboardData.files));
