// The page at /label: look at what waits, name it, undo. label_items.js keeps the items,
// label_tiles.js draws them, label_names.js completes names, label_examples.js shows kept images of a
// class beside, learn.js has the labels learnt.

import { LABEL_TOKEN, READ_TOKEN, ask, keepToken, token } from "./ask.js";
import { $, count, make, percent, show, when } from "./elements.js";
import { Examples } from "./label_examples.js";
import { Items } from "./label_items.js";
import { NameBox } from "./label_names.js";
import { Tiles } from "./label_tiles.js";

const KEYED = 5; // classes that have a key
const REFRESH_MS = 5000;
const ALIKE = 0.7; // the cosine from which images look much alike

const bearer = () => token(LABEL_TOKEN) || token(READ_TOKEN);
let items = new Items(bearer);
const tiles = new Tiles($("grid"), { bearer, onFocus: tell, onNear: loadMore });
const names = new NameBox($("name"), $("names"), { onName: (label) => judge({ label }), onOffer: compare });
const examples = new Examples($("examples"), { bearer, isKnown: (label) => served.has(label) });
let served = new Set(); // classes of the served version
const done = []; // what can be undone, the newest last

/** Show another order or state. Of two that are asked for quickly only the last is shown. */
async function begin() {
  show($("inbox-error"), "");
  const asked = new Items(bearer);
  items = asked;
  try {
    await asked.load({ order: $("order").value, state: $("shown").value });
    if (items !== asked) return;
    tiles.fill(items);
    tellCounts();
    await learnNames();
  } catch (error) {
    fail(error);
  }
}

async function learnNames(path = "classes") {
  try {
    const { classes } = await ask(path, { bearer: bearer() });
    served = new Set(classes.map((one) => one.label));
  } catch {
    served = new Set(); // nothing is served yet: names can be typed all the same
  }
  names.setClasses([...served]);
  examples.clear();
}

async function loadMore() {
  const asked = items;
  if (!asked.hasMore || asked.loading) return;
  $("more").hidden = false;
  try {
    const found = await asked.more();
    if (items === asked) tiles.append(found);
  } catch (error) {
    fail(error);
  }
  $("more").hidden = true;
}

function fail(error) {
  if (!error.refused) {
    show($("inbox-error"), error.message);
    return;
  }
  $("door").hidden = false;
  show($("door-error"), $("door").dataset.tried ? error.message : "");
  $("state").textContent = "Closed";
}

// What is said of the images

function tellCounts() {
  const { unlabelled, labelled, wrong, discarded } = items.counts;
  const others = { labelled, wrong, discarded };
  const told = Object.entries(others).filter(([, images]) => images).map(([state, images]) => `${images} ${state}`);
  $("counts").textContent = [count(unlabelled, "image waits", "images wait"), ...told].join(" · ");
  $("state").textContent = items.collecting ? "This server collects images" : "This server collects no images";
  const empty = !tiles.focused && !items.hasMore;
  $("empty").hidden = !empty;
  if (empty) $("empty").replaceChildren(...emptyHelp());
}

function emptyHelp() {
  if (items.counts.unlabelled + items.counts.labelled + items.counts.wrong + items.counts.discarded) {
    return [make("p", "", $("shown").value === "unlabelled" ? "Everything has a label." : "There are none.")];
  }
  const how = make("pre", "", 'dne-serve --collect "unknown,score<0.6"');
  const help = [make("p", "", "No image was kept yet."), make("p", "", "A server keeps images that it is unsure of when it is told to:"), how];
  if (items.collecting) help.splice(1, 2, make("p", "", "Images that a rule of this server chooses appear here by themselves."));
  return help;
}

function tell() {
  const chosen = tiles.chosen();
  const one = tiles.focused;
  $("panel").hidden = !one && !done.length;
  $("panel").classList.toggle("idle", !one);
  if (!one) return;
  $("panel-title").textContent = chosen.length > 1 ? `${chosen.length} images` : (one.judgement?.label ?? titleOf(one));
  tiles.showLarge($("picture"), one);
  const said = one.judgement ? [`${one.judgement.kind} by ${one.judgement.actor}`] : [];
  const others = one.other_label ? [`version ${one.other_version} says ${one.other_label}`] : [];
  $("facts").textContent = [...said, one.version ? `version ${one.version}` : "taught", ...others, `kept by ${one.rules.join(", ")}`, when(one.time)].join(" · ");
  $("likeliest").replaceChildren(...one.top.slice(0, KEYED).map(choice));
  $("group").hidden = one.group === undefined || Boolean(one.isLoose);
  $("again").hidden = !names.last;
  $("again-name").textContent = names.last ?? "";
  compare(names.offeredName);
}

/** Show kept images of the class that is about to be given, else of the one that was answered. */
function compare(offered) {
  const one = tiles.focused;
  examples.show(offered ?? one?.judgement?.label ?? one?.label ?? null);
}

function titleOf(one) {
  if (one.label === null) return "No label";
  return one.unknown ? `Unknown. Closest class: ${one.label}` : `${one.label}, ${percent(one.score)}`;
}

function choice({ label, score }, place) {
  const button = make("button");
  button.type = "button";
  button.append(make("kbd", "", String(place + 1)), make("span", "name", label), make("span", "value", percent(score)));
  button.addEventListener("click", () => judge({ label }));
  for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => compare(label));
  for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => compare());
  return button;
}

// Judging

/** Label, discard or mark all chosen images, and go on with the next one. */
async function judge(judgement) {
  const chosen = tiles.chosen();
  if (!chosen.length) return;
  show($("label-error"), "");
  const told = await items.judge(chosen, judgement);
  const written = told.filter((one) => !one.error);
  if (written.length) done.push(written);
  $("undo").disabled = done.length === 0;
  const gone = written.map((one) => one.item).filter((item) => item.state !== $("shown").value);
  tiles.remove([...gone, ...told.filter((one) => one.gone).map((one) => one.item)]);
  tiles.clearSelection();
  tiles.focusGrid();
  if (judgement.label && written.length) names.add(judgement.label);
  document.dispatchEvent(new Event("labelled"));
  const what = judgement.label ?? (judgement.discard ? "discarded" : "marked");
  $("told").textContent = written.length ? `${count(written.length, "image", "images")}: ${what}` : "";
  tellProblems(told.filter((one) => one.error));
  tellCounts();
  tell();
}

function tellProblems(problems) {
  const sentences = [...new Set(problems.map((one) => one.error.message))];
  show($("label-error"), sentences.join(" "));
  for (const one of problems) if (!one.gone) tiles.redraw(one.item);
}

async function undo() {
  const last = done.pop();
  $("undo").disabled = done.length === 0;
  if (!last) return;
  const told = await items.takeBack(last);
  const back = told.filter((one) => !one.error).map((one) => one.item);
  tiles.putBack(back.filter((item) => item.state === $("shown").value));
  $("told").textContent = `${count(back.length, "image", "images")}: taken back`;
  document.dispatchEvent(new Event("labelled"));
  tellProblems(told.filter((one) => one.error));
  tellCounts();
  tell();
}

// Keys

/** Select the shown images that look much like the one with the focus. */
async function selectAlike() {
  const one = tiles.focused;
  show($("label-error"), "");
  $("alike").disabled = true;
  try {
    const { items: found } = await ask(`inbox/${one.id}/alike?limit=100`, { bearer: bearer() });
    if (tiles.focused === one) tiles.selectThese(new Set(found.filter(({ similarity }) => similarity >= ALIKE).map(({ item }) => item.id)));
  } catch (error) {
    show($("label-error"), error.message);
  }
  $("alike").disabled = false;
}

function onKey(event) {
  if (event.target === $("name") || event.target.closest("select, #door, summary, dialog, #learn, #teach")) return;
  const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
  if ((event.ctrlKey || event.metaKey) && event.key === "z") act(event, undo);
  else if ((event.ctrlKey || event.metaKey) && event.key === "a") act(event, () => tiles.selectAll());
  else if (plain && event.key === "Enter" && event.shiftKey) act(event, () => tiles.selectGroup());
  else if (plain && (event.key === "Delete" || event.key === "Backspace")) act(event, () => judge({ discard: true }));
  else if (plain && /^[1-5]$/.test(event.key)) act(event, () => judgeByKey(Number(event.key)));
  else if (plain && event.key === " " && !event.target.closest("button")) act(event, () => tiles.toggle());
  else if (plain && event.key === "Enter" && names.last && !event.target.closest("button")) act(event, () => judge({ label: names.last }));
  else if (plain && (event.key === "Home" || event.key === "End")) act(event, () => tiles.moveToEnd(event.key === "End"));
  else if (plain && event.key.startsWith("Page") && tiles.focused?.group !== undefined) act(event, () => tiles.moveToGroup(event.key === "PageDown"));
  else if (event.key.startsWith("Arrow") && !event.metaKey && !event.altKey) act(event, () => tiles.move(event.key, { selecting: event.shiftKey, keeping: event.ctrlKey }));
  else if (plain && event.key.length === 1 && /[\p{L}\p{N}]/u.test(event.key) && tiles.focused) $("name").focus(); // and the letter lands there
}

function act(event, action) {
  event.preventDefault();
  action();
}

function judgeByKey(place) {
  const label = tiles.focused?.top[place - 1]?.label;
  if (label !== undefined) judge({ label });
}

async function keepFresh() {
  if (!document.hidden && $("door").hidden && !items.loading) {
    try {
      const asked = items;
      const fresh = await asked.news();
      if (items === asked) tiles.prepend(fresh);
      tellCounts();
      show($("inbox-error"), "");
    } catch (error) {
      fail(error);
    }
  }
  setTimeout(keepFresh, REFRESH_MS);
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(LABEL_TOKEN, $("door-token").value);
  $("door").dataset.tried = "yes";
  $("door").hidden = true;
  document.dispatchEvent(new Event("token"));
  begin();
});
for (const id of ["order", "shown"]) $(id).addEventListener("change", begin);
$("discard").addEventListener("click", () => judge({ discard: true }));
$("undo").addEventListener("click", undo);
$("alike").addEventListener("click", selectAlike);
$("group").addEventListener("click", () => tiles.selectGroup());
$("again").addEventListener("click", () => judge({ label: names.last }));
$("naming").addEventListener("submit", (event) => event.preventDefault());
$("name").addEventListener("keydown", (event) => {
  if (event.key === "Escape") tiles.focusGrid();
});
document.addEventListener("keydown", onKey);
document.addEventListener("head", ({ detail }) => learnNames(`classes?version=${detail}`));
begin().then(keepFresh);
