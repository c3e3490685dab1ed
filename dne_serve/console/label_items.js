// The items of the inbox as this page knows them, and what the server is asked about them.

import { ask } from "./ask.js";

const PAGE = 200;
const AT_ONCE = 6; // label records on their way

export class Items {
  constructor(bearer) {
    this.bearer = bearer;
    this.counts = { unlabelled: 0, labelled: 0, wrong: 0, discarded: 0 };
    this.collecting = false;
    this.known = new Map();
    this.cursor = null;
    this.loading = false;
  }

  get hasMore() {
    return this.cursor !== null;
  }

  /** Load the first page of an order. Return its items. */
  async load({ order, state }) {
    this.asked = { order, state };
    this.known = new Map();
    this.cursor = null;
    this.loading = true; // news that came before the first page would hide its groups
    try {
      return order === "groups" ? await this.groups() : await this.page();
    } finally {
      this.loading = false;
    }
  }

  async groups() {
    const answer = await ask(`inbox/groups?state=${this.asked.state}`, { bearer: this.bearer() });
    this.take(answer);
    const groups = answer.groups.map(({ items }) => ({ items, name: groupName(items, answer.by) }));
    if (answer.others.length) groups.push({ items: answer.others, isLoose: true, name: groups.length ? "Others, unknown ones first" : "Unknown ones first" });
    return this.keep(groups.flatMap(({ items, name, isLoose }, group) => items.map((item) => ({ ...item, group, groupName: name, isLoose }))));
  }

  async page() {
    const { order, state } = this.asked;
    const query = new URLSearchParams({ order: order === "groups" ? "newest" : order, state, limit: PAGE });
    if (this.cursor) query.set("cursor", this.cursor);
    const answer = await ask(`inbox?${query}`, { bearer: this.bearer() });
    this.take(answer);
    this.cursor = answer.next_cursor;
    return this.keep(answer.items);
  }

  async more() {
    this.loading = true;
    try {
      return await this.page();
    } finally {
      this.loading = false;
    }
  }

  /** Ask for items that came since. Return those that were not known. */
  async news() {
    const query = new URLSearchParams({ order: "newest", state: this.asked.state, limit: 50 });
    const answer = await ask(`inbox?${query}`, { bearer: this.bearer() });
    this.take(answer);
    return this.keep(answer.items);
  }

  take(answer) {
    this.counts = answer.counts;
    this.collecting = answer.collecting;
  }

  keep(found) {
    const fresh = found.filter((item) => !this.known.has(item.id)).map(withoutCleared);
    for (const item of fresh) this.known.set(item.id, item);
    return fresh;
  }

  /** Write a judgement of each item. Return what came of each: the item, its state before, an error. */
  judge(chosen, judgement) {
    return inTurns(chosen, (item) => this.write(item, judgement, { state: item.state, judgement: item.judgement }));
  }

  /** Write what was said before of each item once more. */
  takeBack(written) {
    return inTurns(written, ({ item, before }) => {
      const said = before.judgement;
      const again = said?.kind === "label" ? { label: said.label } : said?.kind === "wrong" ? { wrong: true } : said?.kind === "discard" ? { discard: true } : { clear: true };
      return this.write(item, again, { state: item.state, judgement: item.judgement });
    });
  }

  async write(item, judgement, before) {
    const body = JSON.stringify({ ...judgement, after: item.number });
    const options = { method: "POST", body, bearer: this.bearer(), headers: { "Content-Type": "application/json" } };
    try {
      const record = await ask(`inbox/${item.id}/label`, options);
      this.count(item.state, -1);
      item.number = record.number;
      item.judgement = record.kind === "clear" ? null : record;
      item.state = { label: "labelled", wrong: "wrong", discard: "discarded", clear: "unlabelled" }[record.kind];
      this.count(item.state, 1);
      return { item, before };
    } catch (error) {
      if (error.status === 409) await this.refresh(item);
      return { item, before, error, gone: error.status === 404 || error.status === 410 };
    }
  }

  count(state, more) {
    this.counts[state] = Math.max(0, this.counts[state] + more);
  }

  /** Look again at an item that somebody else has judged meanwhile. */
  async refresh(item) {
    const { history, ...found } = await ask(`inbox/${item.id}`, { bearer: this.bearer() });
    Object.assign(item, withoutCleared(found));
  }
}

function groupName(items, by) {
  return by === "labels" ? `${items.length} nearest to ${items[0].label}` : `${items.length} that look alike`;
}

/** A judgement that was taken back is none. */
function withoutCleared(item) {
  return item.judgement?.kind === "clear" ? { ...item, judgement: null } : item;
}

/** Run a task for each of many, a few at a time. Return the results in order. */
async function inTurns(many, task) {
  const results = new Array(many.length);
  let next = 0;
  const worker = async () => {
    while (next < many.length) {
      const place = next++;
      results[place] = await task(many[place]);
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, many.length) }, worker));
  return results;
}
