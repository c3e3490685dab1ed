// The page at /: what is served, kept fresh. predict.js, versions.js and moves.js do the rest.

import { ask } from "./ask.js";
import { $ } from "./elements.js";
import "./live.js";
import { pause } from "./offline.js";
import { listVersions } from "./versions.js";

const REFRESH_MS = 2000;
const LIST_EVERY = 5; // refreshes: a version that nobody promoted changes nothing else

const model = location.pathname.match(/\/models\/([^/]+)\/$/)?.[1]; // of a server with many

let lastSeen = "";
let ticks = 0;
let failures = 0; // tries in a row that did not reach the server

/** Tell what is served, and list the versions where that may have changed; `listed`: they are on their way. */
async function refresh({ list = false, listed = false } = {}) {
  try {
    const ready = await ask("readyz");
    tellReady(ready);
    const seen = `${ready.record}/${ready.version}`;
    list ||= seen !== lastSeen;
    lastSeen = seen;
  } catch (error) {
    if (error.unreachable) {
      failures += 1;
      lastSeen = "";
      setState("Not connected", true);
      return;
    }
    setState(error.status === 503 ? `Not ready: ${error.message}` : error.message, true);
    list = true; // whatever ends this state is seen at once
    lastSeen = "";
  }
  failures = 0;
  if (!listed && (list || ticks % LIST_EVERY === 0)) await listVersions();
}

function tellReady(ready) {
  const instead = ready.fallback ? ` in place of version ${ready.head}, which the channel names` : "";
  const facts = [`Serving version ${ready.version}${instead}`, ready.channel, `${ready.engine.split(":")[0]} on ${ready.device}`];
  if (ready.error) facts.push(`cannot follow the channel: ${ready.error}`);
  setState(facts.join(" · "), ready.error || ready.fallback);
}

function setState(text, bad) {
  // Only what is new is announced to screen readers.
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("bad", Boolean(bad));
}

async function keepFresh() {
  if (ticks === 0) {
    await Promise.all([listVersions(), refresh({ listed: true })]); // the first view waits for one answer, not for two in turn
  } else if (!document.hidden) {
    await refresh();
  }
  ticks += 1;
  setTimeout(keepFresh, failures ? pause(failures) : REFRESH_MS);
}

if (model) {
  $("title").textContent = model;
  document.title = `${model} · dne-serve`;
  $("all-models").hidden = false;
  document.querySelector("nav a[href=metrics]").hidden = true; // they are of the whole server
}
for (const event of ["token", "moved"]) document.addEventListener(event, () => refresh({ list: true }));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh({ list: true });
});
keepFresh();
