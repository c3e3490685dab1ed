// A box that completes names of classes, and takes new ones.

import { make } from "./elements.js";

const SHOWN = 8;

export class NameBox {
  constructor(input, list, { onName, onOffer }) {
    this.input = input;
    this.list = list;
    this.onName = onName;
    this.onOffer = onOffer;
    this.given = []; // names that were given here, the last one first
    this.served = [];
    this.offered = [];
    this.place = 0;
    input.addEventListener("input", () => this.offer());
    input.addEventListener("focus", () => this.offer());
    input.addEventListener("blur", () => this.close());
    input.addEventListener("keydown", (event) => this.onKey(event));
  }

  setClasses(names) {
    this.served = names;
  }

  get classes() {
    return [...new Set([...this.given, ...this.served])];
  }

  /** The name that was given last; undefined before the first. */
  get last() {
    return this.given[0];
  }

  /** Remember a name that was given, so that it is offered from now on, and first. */
  add(name) {
    this.given = [name, ...this.given.filter((one) => one !== name)];
  }

  offer() {
    const typed = this.input.value.trim().normalize("NFC");
    const sought = typed.toLowerCase();
    const classes = this.classes;
    const begins = classes.filter((name) => name.toLowerCase().startsWith(sought));
    const within = classes.filter((name) => !begins.includes(name) && name.toLowerCase().includes(sought));
    this.offered = typed ? [...begins, ...within].slice(0, SHOWN).map((name) => ({ name })) : [];
    if (typed && !classes.includes(typed)) this.offered.push({ name: typed, isNew: true });
    this.place = 0;
    this.draw();
  }

  /** The name that Enter would take; undefined where nothing is offered. */
  get offeredName() {
    return this.offered[this.place]?.name;
  }

  draw() {
    this.onOffer(this.offeredName);
    this.list.hidden = this.offered.length === 0;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    this.list.replaceChildren(...this.offered.map((one, place) => this.row(one, place)));
    if (this.list.hidden) this.input.removeAttribute("aria-activedescendant");
    else this.input.setAttribute("aria-activedescendant", `name-${this.place}`);
  }

  row(one, place) {
    const row = make("div", one.isNew ? "new" : "", one.isNew ? `New class: ${one.name}` : one.name);
    row.id = `name-${place}`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(place === this.place));
    row.addEventListener("pointerenter", () => this.onOffer(one.name));
    row.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // the box keeps the focus
      this.take(one.name);
    });
    return row;
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && this.offered.length) {
      event.preventDefault();
      this.place = (this.place + step + this.offered.length) % this.offered.length;
      this.draw();
    } else if (event.key === "Enter" && this.offered.length) {
      event.preventDefault();
      this.take(this.offered[this.place].name);
    } else if (event.key === "Escape") {
      this.input.value = "";
      this.close();
    }
  }

  take(name) {
    this.input.value = "";
    this.close();
    this.onName(name);
  }

  close() {
    this.offered = [];
    this.draw();
  }
}
