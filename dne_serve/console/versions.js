// The list of versions and the history of the channel. version_facts.js and versions_tree.js draw it.

import { ask } from "./ask.js";
import { $, make, refill, show, when } from "./elements.js";
import { moveButton, proposal } from "./moves.js";
import { askForToken } from "./predict.js";
import { reportLink, versionFacts } from "./version_facts.js";
import { lanesOf, rail, treeOf } from "./versions_tree.js";

const NEWEST = 40; // versions of the first view, which a person waits for
const HISTORY = 50; // records shown
const OPEN = 3; // newest versions whose details are shown
const NO_STORE = "urn:dne-serve:problem:store-not-found";

const known = new Map(); // what was told of each version, by number
let oldest = null; // the oldest version that somebody asked to see; null: only the newest page
let before = null; // where the next older page ends; null: there is none
let locked = false; // a token is missing: asking again would be one wrong guess more
let newest = null;
let asking = false; // an older page is on its way

/** Ask for the newest versions, and show them with the older ones that are shown already. */
export async function listVersions() {
  if (locked) return;
  try {
    newest = await ask(`versions?limit=${NEWEST}`);
    keep(newest.versions);
    await keepServed(newest.served);
    if (oldest === null) before = newest.next_before ?? null;
    showAll();
    show($("versions-error"), (newest.problems ?? []).join(" "));
    show($("locked"), newest.moves_refused ? `The channel cannot be moved from this page: ${newest.moves_refused}. dne-store can move it.` : "");
  } catch (error) {
    if (error.refused) {
      locked = true;
      askForToken(error.message);
    }
    tellFailure(error);
  }
}

function tellFailure(error) {
  const isNew = error.type === NO_STORE && known.size === 0;
  teach(isNew);
  show($("locked"), error.refused ? "The versions are listed once a token with the scope read is given." : "");
  show($("versions-error"), isNew || error.refused || error.unreachable ? "" : error.message);
}

/** Say how to begin, where there is nothing to be asked yet. */
function teach(isFirst) {
  $("no-versions").hidden = $("nothing-to-ask").hidden = !isFirst;
  $("options").hidden = isFirst;
}

/** Remember a page. Versions between its first and its last that it lacks have been deleted. */
function keep(page, { isNewest = true } = {}) {
  const first = page[0]?.version ?? 0;
  const last = isNewest ? Infinity : (page.at(-1)?.version ?? 0);
  for (const number of [...known.keys()]) {
    const gone = number >= first && number <= last;
    if (gone || (isNewest && (oldest === null || number < oldest))) known.delete(number);
  }
  for (const one of page) known.set(one.version, one);
}

/** Remember the served version, which may be older than the newest page. */
async function keepServed(served) {
  if (served === null || known.has(served)) return;
  const { versions } = await ask(`versions?before=${served + 1}&limit=1`);
  for (const one of versions) if (one.version === served) known.set(served, one);
}

async function showOlder() {
  if (asking) return;
  asking = true; // the button stays enabled, because a disabled one loses the focus
  try {
    const page = await ask(`versions?before=${before}`);
    oldest = page.versions[0]?.version ?? oldest;
    before = page.next_before ?? null;
    keep(page.versions, { isNewest: false });
    showAll();
    if ($("older").hidden) $(`move-to-${page.versions.at(-1)?.version}`)?.focus();
  } catch (error) {
    show($("versions-error"), error.message);
  } finally {
    asking = false;
  }
}

function showAll() {
  const rows = [...known.values()].sort((a, b) => b.version - a.version);
  const tree = treeOf(rows, before ?? 0);
  const moves = new Map(newest.history.map((record) => [record.target, record])); // the newest of each
  $("versions").style.setProperty("--lanes", lanesOf(tree));
  refill($("versions"), rows.map((one, i) => versionRow(one, { place: tree[i], move: moves.get(one.version), open: i < OPEN || one.version === newest.served })));
  teach(!rows.length);
  listChoices(rows);
  listHistory(newest.history);
  const more = before === null ? 0 : Math.max(newest.total - rows.length, 0);
  show($("older"), more ? `Show older (${more} more)` : "");
  const pinned = newest.mode === "pin";
  $("resume").hidden = !pinned || Boolean(newest.moves_refused);
  show($("pinned"), pinned ? "The channel was rolled back. It stays here until it is resumed or a version is promoted." : "");
}

function versionRow(one, { place, move, open }) {
  const served = one.version === newest.served;
  const row = make("li", served ? "version served" : "version");
  row.dataset.version = one.version;
  const card = make("div", "card");
  const head = make("div", "head");
  head.append(make("h3", "", `Version ${one.version}`));
  if (served) head.append(make("span", "badge", "served"));
  if (one.gate === "refused" || one.gate === "overruled") head.append(make("span", `badge ${one.gate}`, one.gate));
  if (!one.error) head.append(reportLink(one));
  card.append(head);
  if (!served && !one.error && !newest.moves_refused) card.append(moveButton(one, newest));
  if (one.error) card.append(make("p", "", one.error));
  else card.append(make("p", "change", one.change), ...versionFacts(one, { move, open }));
  const { growth } = newest;
  if (growth?.version === one.version) card.append(proposal(growth.says, { version: one.version, refused: newest.moves_refused }));
  row.append(rail(place), card);
  return row;
}

function listChoices(rows) {
  const chosen = $("ask").value;
  const options = rows.filter((one) => !one.error).map((one) => new Option(`version ${one.version}`, one.version));
  $("ask").replaceChildren(new Option("the served version", ""), ...options);
  $("ask").value = options.some((option) => option.value === chosen) ? chosen : "";
}

function listHistory(history) {
  $("history-box").hidden = history.length === 0;
  $("history").replaceChildren(
    ...history.slice(-HISTORY).reverse().map((record) => {
      const row = make("li", "", record.mode === "pin" ? `Rolled back to version ${record.target}` : `Followed version ${record.target}`);
      const about = [when(record.time), record.actor, record.reason].filter(Boolean).join(" · ");
      row.append(make("div", "about", about));
      return row;
    }),
  );
}

$("older").addEventListener("click", showOlder);
document.addEventListener("token", () => {
  locked = false;
});
