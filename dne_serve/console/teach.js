// The New classes part of the page at /label: folders, zips and photos become labelled images of the
// inbox. learn.js counts them and has them learnt.

import { LABEL_TOKEN, READ_TOKEN, ask, token } from "./ask.js";
import { entriesOf, filesIn, isImage, isStray, isZip, onDrop } from "./dropped.js";
import { $, count, make, show, sleep } from "./elements.js";
import { filesInZip } from "./zip.js";

const MOST = 5000; // files of a drop
const GROUP_IMAGES = 8;
const GROUP_BYTES = 4 * 2 ** 20;
const TRIES = 5;
const SHOWN_BAD = 50;
const BUSY = new Set([429, 503]);

const bearer = () => token(LABEL_TOKEN) || token(READ_TOKEN);
const classes = new Map(); // by name, as they were dropped here
const waiting = []; // pictures: class and `read`
let loose = []; // pictures without a folder
let working = false;
let total = 0;
let sent = 0;

// Ways in

/** Take files with their folders. A picture belongs to the class of the folder that it lies in. */
async function take(listed, isCut) {
  show($("teach-error"), "");
  const left = [];
  const pictures = [];
  for (const { path, file } of listed.filter(({ path }) => !isStray(path))) {
    if (isZip(file)) {
      const inside = await filesInZip(file, MOST);
      isCut ||= inside.length > MOST;
      const images = inside.filter((one) => !isStray(one.path) && isImage({ name: one.path.at(-1) }));
      left.push(...inside.filter((one) => !isStray(one.path) && !images.includes(one)).map((one) => one.path.join("/")));
      // A zip of photos without folders is a folder itself.
      pictures.push(...images.map((one) => ({ ...one, path: one.path.length > 1 ? one.path : [file.name.replace(/\.zip$/i, ""), ...one.path] })));
    } else if (isImage(file)) pictures.push({ path, read: async () => file });
    else left.push(path.join("/"));
  }
  if (isCut || pictures.length > MOST) {
    show($("teach-error"), `More than ${MOST} files at once: nothing was taken. Drop fewer, or learn large folders with dne-train add-task --data FOLDER.`);
    return;
  }
  for (const one of pictures.filter(({ path }) => path.length > 1)) queue(one, one.path.at(-2));
  loose = pictures.filter(({ path }) => path.length === 1);
  $("loose").hidden = loose.length === 0;
  $("loose-count").textContent = count(loose.length, "photo has no folder", "photos have no folder");
  if (loose.length) $("loose-name").focus();
  if (left.length) show($("teach-error"), `Left out, because not an image: ${left.slice(0, 5).join(", ")}${left.length > 5 ? ` and ${left.length - 5} more` : ""}.`);
  else if (!pictures.length) show($("teach-error"), "There is no image in it.");
  work();
}

function queue(picture, name) {
  const label = name.trim().normalize("NFC");
  if (!classes.has(label)) classes.set(label, { label, items: new Set(), known: 0, bad: [], waits: 0 });
  classes.get(label).waits += 1;
  waiting.push({ ...picture, label });
  total += 1;
}

async function takeSafely(listing) {
  $("teach-box").open = true;
  try {
    const { found, isCut } = await listing();
    await take(found, isCut);
  } catch (error) {
    show($("teach-error"), error.message || "The files cannot be read.");
  }
}

function takeChosen(input) {
  const files = [...input.files].map((file) => ({ file, path: (file.webkitRelativePath || file.name).split("/") }));
  takeSafely(async () => ({ found: files, isCut: files.length > MOST }));
  input.value = ""; // so that the same files can be chosen again
}

// Sending

async function work() {
  if (working) return;
  working = true;
  try {
    while (waiting.length) await sendGroup(await nextGroup());
    total = sent = 0;
  } catch (error) {
    show($("teach-error"), error.refused ? `${error.message} ${count(waiting.length, "photo waits", "photos wait")} for a token.` : error.message);
    if (error.refused) $("door").hidden = false;
    else waiting.splice(0).forEach(({ label }) => (classes.get(label).waits -= 1));
  }
  working = false;
  draw();
  document.dispatchEvent(new Event("labelled"));
}

/** Read the next pictures of one class. One that cannot be read is bad. */
async function nextGroup() {
  const group = [];
  let bytes = 0;
  while (waiting.length && group.length < GROUP_IMAGES && bytes < GROUP_BYTES && (!group.length || waiting[0].label === group[0].label)) {
    const one = waiting.shift();
    try {
      const file = await one.read();
      if (group.length && bytes + file.size > GROUP_BYTES) {
        waiting.unshift({ ...one, read: async () => file });
        break;
      }
      bytes += file.size;
      group.push({ ...one, file });
    } catch (error) {
      bad(one, error.message);
    }
  }
  return group;
}

async function sendGroup(group) {
  if (!group.length) return;
  draw();
  const form = new FormData();
  for (const { file } of group) form.append("files", file, file.name);
  const query = new URLSearchParams({ label: group[0].label });
  try {
    const { pictures } = await ask(`inbox?${query}`, { method: "POST", body: form, bearer: bearer() });
    const again = group.filter((one, i) => !settle(one, pictures[i]));
    waiting.unshift(...again);
    if (again.length) await sleep(1000);
  } catch (error) {
    if (error.refused || error.unreachable) {
      waiting.unshift(...group);
      throw error;
    }
    if (BUSY.has(error.status) && tried(group[0]) < TRIES) {
      waiting.unshift(...group);
      await sleep(1000 * error.retryAfter);
    } else for (const one of group) bad(one, error.message);
  }
}

const tried = (one) => (one.tries = (one.tries ?? 0) + 1);

/** Note what became of a picture. Return whether it is settled; else it is sent again. */
function settle(one, { outcome, item, why }) {
  if (outcome === "refused" && tried(one) < TRIES) return false;
  const its = classes.get(one.label);
  if (item === null) {
    bad(one, why);
    return true;
  }
  its.known += outcome === "known";
  its.items.add(item);
  its.waits -= 1;
  sent += 1;
  return true;
}

function bad(one, why) {
  const its = classes.get(one.label);
  its.bad.push(`${one.path.at(-1)}: ${why}`);
  its.waits -= 1;
  sent += 1;
}

// What is shown

function draw() {
  $("taught").replaceChildren(...[...classes.values()].map(row));
  $("teach-progress").hidden = !working;
  $("teach-bar").max = Math.max(1, total);
  $("teach-bar").value = sent;
  $("teach-count").textContent = `${sent} of ${count(total, "photo", "photos")}`;
}

function row(its) {
  const element = make("li");
  const parts = [count(its.items.size, "photo", "photos")];
  if (its.known) parts.push(`${its.known} of them here before`);
  if (its.waits) parts.push(`${its.waits} to go`);
  element.append(make("bdi", "name", its.label), make("span", "value", parts.join(" · ")));
  if (its.bad.length) {
    const box = make("details", "bad");
    box.append(make("summary", "", `${its.bad.length} could not be used`), list(its.bad));
    element.append(box);
  }
  if (!its.waits) {
    const button = Object.assign(make("button", "", "Take out"), { type: "button" });
    button.append(make("span", "visually-hidden", ` ${its.label}`));
    button.addEventListener("click", () => takeOut(its, button));
    element.append(button);
  }
  return element;
}

function list(lines) {
  const element = make("ul");
  const more = lines.length > SHOWN_BAD ? [`and ${lines.length - SHOWN_BAD} more`] : [];
  element.append(...[...lines.slice(0, SHOWN_BAD), ...more].map((text) => make("li", "", text)));
  return element;
}

/** Take back the labels that were given here. The pictures go to the trash of the inbox. */
async function takeOut(its, button) {
  button.disabled = true;
  try {
    for (const item of its.items) {
      await ask(`inbox/${item}/label`, { method: "POST", bearer: bearer(), headers: { "Content-Type": "application/json" }, body: '{"discard": true}' });
      its.items.delete(item);
    }
    classes.delete(its.label);
  } catch (error) {
    show($("teach-error"), error.message);
  }
  draw();
  document.dispatchEvent(new Event("labelled"));
}

for (const id of ["teach-files", "teach-folder"]) $(id).addEventListener("change", () => takeChosen($(id)));
$("loose").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const one of loose.splice(0)) queue(one, $("loose-name").value);
  $("loose").hidden = true;
  $("loose-name").value = "";
  work();
});
onDrop($("drop"), (transfer) => {
  const entries = entriesOf(transfer);
  const files = [...transfer.files].map((file) => ({ file, path: [file.name] }));
  takeSafely(async () => (entries.length ? filesIn(entries, MOST) : { found: files, isCut: false }));
});
document.addEventListener("token", work);
document.addEventListener("head", () => {
  for (const its of [...classes.values()]) if (!its.waits) classes.delete(its.label); // they are learnt
  draw();
});
if (location.hash === "#teach") $("teach-box").open = true;
