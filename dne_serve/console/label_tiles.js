// The grid: a tile an item, in order; the tile with the focus, and those that are selected.

import { make, percent } from "./elements.js";

const NEAR = "1200px"; // pictures this near to what is seen are fetched

export class Tiles {
  constructor(grid, { bearer, onFocus, onNear }) {
    this.grid = grid;
    this.bearer = bearer;
    this.onFocus = onFocus;
    this.onNear = onNear;
    this.items = new Map(); // by id; tiles are in the order of the page
    this.selected = new Set();
    this.focused = null;
    this.pictures = new Map(); // addresses of pictures that were fetched
    this.watcher = new IntersectionObserver((seen) => this.onSeen(seen), { rootMargin: NEAR });
    grid.addEventListener("click", (event) => this.onClick(event));
    grid.addEventListener("focusin", (event) => this.onFocusIn(event));
  }

  fill(items) {
    for (const address of this.pictures.values()) URL.revokeObjectURL(address);
    this.pictures.clear();
    this.watcher.disconnect();
    this.items.clear();
    this.selected.clear();
    this.focused = null;
    this.grid.replaceChildren();
    this.append([...items.known.values()]);
    this.focusOn(this.tiles()[0], { quietly: true });
    this.onFocus();
  }

  append(items) {
    this.grid.append(...items.flatMap((item) => this.withHeading(item)));
  }

  prepend(items) {
    this.grid.prepend(...items.map((item) => this.tile(item)));
    if (!this.focused && items.length) this.focusOn(this.tiles()[0], { quietly: true });
  }

  /** Show items again that were taken away, where they were if that place is still there. */
  putBack(items) {
    for (const item of items) {
      const next = item.next && this.tileOf(item.next);
      if (next) next.before(this.tile(item));
      else this.grid.append(this.tile(item));
    }
    if (items.length) this.focusOn(this.tileOf(items[0].id));
  }

  remove(items) {
    const gone = new Set(items.map((item) => item.id));
    if (!gone.size) return;
    const all = this.tiles();
    const from = all.findIndex((tile) => tile.dataset.id === this.focused?.id);
    const after = all.slice(from).find((tile) => !gone.has(tile.dataset.id));
    const before = all.slice(0, Math.max(from, 0)).reverse().find((tile) => !gone.has(tile.dataset.id));
    for (const [place, tile] of all.entries()) {
      if (!gone.has(tile.dataset.id)) continue;
      this.items.get(tile.dataset.id).next = all.slice(place + 1).find((one) => !gone.has(one.dataset.id))?.dataset.id;
      this.watcher.unobserve(tile);
      this.items.delete(tile.dataset.id);
      tile.remove();
    }
    this.dropHeadings();
    this.focused = null;
    this.focusOn(after ?? before);
    if (this.items.size < 50) this.onNear();
  }

  redraw(item) {
    const tile = this.tileOf(item.id);
    if (tile) this.say(tile, item);
  }

  // Tiles

  withHeading(item) {
    const last = this.grid.lastElementChild?.dataset.group ?? this.lastGroup;
    const begins = item.group !== undefined && String(item.group) !== last;
    this.lastGroup = String(item.group);
    if (!begins) return [this.tile(item)];
    const heading = make("p", "group-name", item.groupName);
    heading.dataset.group = item.group;
    return [heading, this.tile(item)];
  }

  dropHeadings() {
    for (const heading of this.grid.querySelectorAll(".group-name")) {
      if (!heading.nextElementSibling?.classList.contains("tile")) heading.remove();
    }
  }

  tile(item) {
    this.items.set(item.id, item);
    const tile = make("div", item.unknown ? "tile unknown" : "tile");
    tile.dataset.id = item.id;
    if (item.group !== undefined) tile.dataset.group = item.group;
    tile.setAttribute("role", "option");
    tile.setAttribute("aria-selected", "false");
    tile.tabIndex = -1;
    tile.append(make("div", "frame"), make("p", "said"), make("p", "why"));
    this.say(tile, item);
    this.watcher.observe(tile);
    return tile;
  }

  say(tile, item) {
    const [, said, why] = tile.children;
    const label = item.judgement?.label ?? item.label;
    said.textContent = item.judgement ? label : item.unknown ? "Unknown" : (label ?? "No label");
    why.textContent = item.judgement ? item.judgement.kind : item.unknown ? `closest: ${item.label}` : item.score === null ? "taught" : percent(item.score);
    tile.title = `${said.textContent}, ${why.textContent}`;
  }

  onSeen(seen) {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      this.watcher.unobserve(target);
      this.draw(target);
      const last = this.grid.lastElementChild;
      if (target === last || target.nextElementSibling === last) this.onNear();
    }
  }

  async draw(tile) {
    const image = make("img");
    image.alt = "";
    const address = await this.pictureOf(this.items.get(tile.dataset.id));
    if (!address || !tile.isConnected) return;
    image.src = address;
    image.onload = () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 64);
    tile.firstElementChild.replaceChildren(image);
  }

  /** Fetch a picture once. The token travels as a header, which an img element cannot send. */
  async pictureOf(item) {
    if (!item) return null;
    if (!this.pictures.has(item.id)) {
      const bearer = this.bearer();
      const answer = await fetch(`inbox/${item.id}/image`, { headers: bearer ? { Authorization: `Bearer ${bearer}` } : {} }).catch(() => null);
      if (!answer?.ok) return null;
      this.pictures.set(item.id, URL.createObjectURL(await answer.blob()));
    }
    return this.pictures.get(item.id);
  }

  async showLarge(image, item) {
    const address = await this.pictureOf(item);
    if (address && this.focused === item && image.src !== address) image.src = address;
  }

  // Focus and selection

  tiles() {
    return [...this.grid.querySelectorAll(".tile")];
  }

  tileOf(id) {
    return this.grid.querySelector(`.tile[data-id="${CSS.escape(id)}"]`);
  }

  /** List the selected items, or the one that has the focus. */
  chosen() {
    const some = this.tiles().map((tile) => tile.dataset.id).filter((id) => this.selected.has(id));
    return (some.length ? some : this.focused ? [this.focused.id] : []).map((id) => this.items.get(id));
  }

  focusOn(tile, { quietly = false } = {}) {
    for (const one of this.grid.querySelectorAll('.tile[tabindex="0"]')) one.tabIndex = -1;
    this.focused = tile ? this.items.get(tile.dataset.id) : null;
    if (!tile) return;
    tile.tabIndex = 0;
    if (!quietly) tile.focus();
  }

  focusGrid() {
    const tile = this.focused && this.tileOf(this.focused.id);
    (tile ?? this.grid).focus();
  }

  onFocusIn(event) {
    const tile = event.target.closest(".tile");
    if (!tile || this.focused?.id === tile.dataset.id) return;
    this.focusOn(tile, { quietly: true });
    this.onFocus();
  }

  onClick(event) {
    const tile = event.target.closest(".tile");
    if (!tile) return;
    const from = this.focused && this.tileOf(this.focused.id);
    if (event.shiftKey && from) this.selectRange(this.anchor ?? from, tile);
    else if (event.ctrlKey || event.metaKey) this.mark(tile, !this.selected.has(tile.dataset.id));
    else this.clearSelection();
    if (!event.shiftKey) this.anchor = tile;
    this.focusOn(tile);
    this.onFocus();
  }

  /** Move the focus. `selecting` selects on the way; `keeping` leaves the selection as it is. */
  move(key, { selecting, keeping }) {
    const all = this.tiles();
    const from = all.findIndex((tile) => tile.dataset.id === this.focused?.id);
    if (from < 0) return this.focusOn(all[0]);
    const to = this.neighbour(all, from, key);
    if (!to) return undefined;
    if (selecting) this.selectRange((this.anchor ??= all[from]), to);
    else this.anchor = null;
    if (!selecting && !keeping) this.clearSelection();
    this.focusOn(to);
    return this.onFocus();
  }

  /** Move to the first image of the next group, or of this one, or of the one before. */
  moveToGroup(isDown) {
    const all = this.tiles();
    const from = all.findIndex((tile) => tile.dataset.id === this.focused?.id);
    const others = isDown ? all.slice(from + 1).filter((tile) => tile.dataset.group !== all[from].dataset.group) : all.slice(0, from).reverse();
    if (others.length) this.moveTo(all.find((tile) => tile.dataset.group === others[0].dataset.group));
  }

  /** Move to the first image or to the last one. */
  moveToEnd(isLast) {
    const tile = this.tiles().at(isLast ? -1 : 0);
    if (tile) this.moveTo(tile);
  }

  moveTo(tile) {
    this.anchor = null;
    this.clearSelection();
    this.focusOn(tile);
    this.onFocus();
  }

  neighbour(all, from, key) {
    if (key === "ArrowRight") return all[from + 1];
    if (key === "ArrowLeft") return all[from - 1];
    const here = all[from].getBoundingClientRect();
    const down = key === "ArrowDown";
    const rows = (down ? all.slice(from + 1) : all.slice(0, from).reverse()).map((tile) => ({ tile, box: tile.getBoundingClientRect() }));
    const next = rows.find(({ box }) => (down ? box.top > here.top + 1 : box.top < here.top - 1));
    if (!next) return undefined;
    const row = rows.filter(({ box }) => Math.abs(box.top - next.box.top) < 2);
    return row.reduce((best, one) => (Math.abs(one.box.left - here.left) < Math.abs(best.box.left - here.left) ? one : best)).tile;
  }

  toggle() {
    const tile = this.focused && this.tileOf(this.focused.id);
    if (tile) this.mark(tile, !this.selected.has(tile.dataset.id));
    this.onFocus();
  }

  selectRange(one, other) {
    const all = this.tiles();
    const [from, to] = [all.indexOf(one), all.indexOf(other)].sort((a, b) => a - b);
    this.clearSelection();
    for (const tile of all.slice(Math.max(from, 0), to + 1)) this.mark(tile, true);
  }

  selectAll() {
    for (const tile of this.tiles()) this.mark(tile, true);
    this.onFocus();
  }

  /** Select the items with these ids that are shown, and the one that has the focus. */
  selectThese(ids) {
    for (const tile of this.tiles()) this.mark(tile, ids.has(tile.dataset.id) || tile.dataset.id === this.focused?.id);
    this.onFocus();
  }

  /** Select the group of the focused image. Images that look like no other are no group. */
  selectGroup() {
    if (this.focused?.group === undefined || this.focused.isLoose) return;
    for (const tile of this.tiles()) this.mark(tile, this.items.get(tile.dataset.id).group === this.focused.group);
    this.onFocus();
  }

  clearSelection() {
    for (const tile of this.grid.querySelectorAll('.tile[aria-selected="true"]')) this.mark(tile, false);
    this.selected.clear();
  }

  mark(tile, isSelected) {
    tile.setAttribute("aria-selected", String(isSelected));
    if (isSelected) this.selected.add(tile.dataset.id);
    else this.selected.delete(tile.dataset.id);
  }
}
