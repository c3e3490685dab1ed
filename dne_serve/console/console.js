"use strict";

// Class names, file names and reasons come from strangers: they reach the page as text only.

const REFRESH_MS = 2000;
const LIST_EVERY = 5; // refreshes: a version that nobody promoted changes nothing else
const SHOWN = 20; // answers kept on the page
const NAMED = 12; // new classes of a version
const TOP_K = 5;
const TOKEN_KEY = "dne-token";

const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function show(element, text) {
  element.textContent = text ?? "";
  element.hidden = !text;
}

const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

/** The JSON of an answer; throws an Error with the problem's own sentence otherwise. */
async function ask(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server cannot be reached.");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const error = new Error(body.detail || `The server answered ${answer.status}.`);
    error.status = answer.status;
    error.refused = answer.status === 401 || answer.status === 403;
    throw error;
  }
  return body;
}

// The door, where this server asks for a token

function askForToken(error) {
  if (error.refused) $("door").hidden = false;
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, $("door-token").value);
  $("door").hidden = true;
  show($("predict-error"), "");
  refresh({ list: true });
});

// Predictions

async function predict(files) {
  if (!files.length) return;
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  const query = new URLSearchParams({ top_k: TOP_K });
  if ($("ask").value) query.set("version", $("ask").value);
  show($("predict-error"), "");
  $("drop").setAttribute("aria-busy", "true");
  try {
    const answer = await ask(`predict?${query}`, { method: "POST", body: form });
    const rows = answer.predictions.map((one, i) => answerRow(one, files[i], answer.version));
    $("answers").prepend(...rows);
    while ($("answers").children.length > Math.max(SHOWN, rows.length)) $("answers").lastChild.remove();
  } catch (error) {
    show($("predict-error"), error.message);
    askForToken(error);
  } finally {
    $("drop").removeAttribute("aria-busy");
  }
}

function answerRow(prediction, file, version) {
  const row = make("li", "answer");
  row.append(thumbnail(file));
  const box = make("div");
  const about = [`version ${version}`, `task ${prediction.task}`, prediction.filename];
  if (prediction.unknown) about.unshift("unlike anything known");
  box.append(
    make("p", "label", `${prediction.label} · ${percent(prediction.score)}`),
    make("p", "about", about.filter(Boolean).join(" · ")),
  );
  const bars = make("div", "bars");
  bars.append(...prediction.top.map(bar));
  box.append(bars);
  row.append(box);
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
  return image;
}

function bar({ label, score }) {
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

function takeImages(items) {
  predict([...items].filter((file) => file instanceof File));
}

$("files").addEventListener("change", (event) => {
  takeImages(event.target.files);
  event.target.value = ""; // so that the same file can be chosen again
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault(); // a browser would leave the page to show the file
  $("drop").classList.remove("over");
  takeImages(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => takeImages(event.clipboardData.files));

// State and versions

let lastSeen = "";
let ticks = 0;

async function refresh({ list = false } = {}) {
  try {
    const ready = await ask("readyz");
    const error = ready.error ? ` · cannot follow the channel: ${ready.error}` : "";
    setState(`Serving version ${ready.version} · ${ready.channel} · ${ready.backend} on ${ready.device}${error}`, error);
    const seen = `${ready.record}/${ready.version}`;
    list ||= seen !== lastSeen;
    lastSeen = seen;
  } catch (error) {
    setState(error.status === 503 ? `Not ready: ${error.message}` : error.message, true);
    lastSeen = "";
  }
  if (list || ticks % LIST_EVERY === 0) await listVersions();
}

function setState(text, bad) {
  // Only what is new is announced to screen readers.
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", Boolean(bad));
}

async function listVersions() {
  try {
    const overview = await ask("versions");
    const newestFirst = overview.versions.slice().reverse();
    keepFocus(() => $("versions").replaceChildren(...newestFirst.map((one) => versionRow(one, overview))));
    $("no-versions").hidden = newestFirst.length > 0;
    listChoices(newestFirst);
    listHistory(overview.history);
    const pinned = overview.mode === "pin";
    $("resume").hidden = !pinned;
    show($("pinned"), pinned ? "The channel was rolled back. It stays here until it is resumed or a version is promoted." : "");
    show($("versions-error"), "");
  } catch (error) {
    if (error.status !== 503) show($("versions-error"), error.message);
    askForToken(error);
  }
}

function keepFocus(change) {
  const id = document.activeElement?.id;
  change();
  if (id && document.activeElement?.id !== id) $(id)?.focus();
}

function versionRow(one, overview) {
  const served = one.version === overview.served;
  const row = make("li", served ? "version served" : "version");
  row.dataset.version = one.version;
  row.append(make("h3", "", `Version ${one.version}`));
  if (served) row.append(make("span", "badge", "served"));
  else if (!one.error) row.append(moveButton(one, overview));
  if (one.error) row.append(make("p", "", one.error));
  else row.append(versionFacts(one), make("p", "", `new: ${someOf(one.new_classes)}`));
  return row;
}

function versionFacts(one) {
  const facts = [`${count(one.classes, "class", "classes")} in ${count(one.tasks, "task", "tasks")}`];
  if (one.accuracy.all !== null) facts.push(`accuracy ${percent(one.accuracy.all)}`);
  facts.push(`+${(one.delta_bytes / 2 ** 20).toFixed(2)} MiB`, when(one.created));
  const line = make("p");
  facts.forEach((fact, i) => line.append(i ? " · " : "", make("span", "fact", fact)));
  return line;
}

const count = (n, one, many) => `${n} ${n === 1 ? one : many}`;
const someOf = (names) => names.slice(0, NAMED).join(", ") + (names.length > NAMED ? " …" : "");

const when = (time) => new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

function moveButton(one, overview) {
  // Older than what is served: a way back. Newer: a way on.
  const back = overview.served !== null && one.version < overview.served;
  const button = make("button", "", back ? "Roll back" : "Promote");
  button.type = "button";
  button.id = `move-to-${one.version}`;
  button.setAttribute("aria-label", back ? `Roll back to version ${one.version}` : `Promote version ${one.version}`);
  button.addEventListener("click", () => openMove({ path: back ? "rollback" : "promote", to: one.version, title: button.ariaLabel, verb: button.textContent }));
  return button;
}

function listChoices(newestFirst) {
  const chosen = $("ask").value;
  const options = newestFirst.filter((one) => !one.error).map((one) => new Option(`version ${one.version}`, one.version));
  $("ask").replaceChildren(new Option("the served version", ""), ...options);
  $("ask").value = options.some((option) => option.value === chosen) ? chosen : "";
}

function listHistory(history) {
  $("history-box").hidden = history.length === 0;
  $("history").replaceChildren(
    ...history.slice(-50).reverse().map((record) => {
      const row = make("li", "", record.mode === "pin" ? `Rolled back to version ${record.target}` : `Followed version ${record.target}`);
      const about = [when(record.time), record.actor, record.reason].filter(Boolean).join(" · ");
      row.append(make("div", "about", about));
      return row;
    }),
  );
}

// Moving the channel

let move = null;

function openMove(wanted) {
  move = wanted;
  $("move-title").textContent = wanted.title;
  $("move-go").textContent = wanted.verb;
  $("token").value = sessionStorage.getItem(TOKEN_KEY) ?? "";
  $("token-box").hidden = Boolean($("token").value);
  $("reason").value = "";
  show($("move-error"), "");
  $("move").showModal();
}

$("resume").addEventListener("click", () => openMove({ path: "resume", title: "Resume following", verb: "Resume" }));
$("move-cancel").addEventListener("click", () => $("move").close());
$("move-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = { reason: $("reason").value };
  if (move.to !== undefined) body.to = move.to;
  $("move-go").disabled = true;
  try {
    await ask(move.path, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${$("token").value}` },
      body: JSON.stringify(body),
    });
    sessionStorage.setItem(TOKEN_KEY, $("token").value);
    $("move").close();
  } catch (error) {
    if (error.refused) {
      sessionStorage.removeItem(TOKEN_KEY);
      $("token-box").hidden = false;
    }
    show($("move-error"), error.message);
  } finally {
    $("move-go").disabled = false;
  }
  await refresh({ list: true });
});

async function keepFresh() {
  if (!document.hidden) {
    await refresh();
    ticks += 1;
  }
  setTimeout(keepFresh, REFRESH_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh({ list: true });
});
keepFresh();
