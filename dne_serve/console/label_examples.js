// A few kept images of the class that a person thinks of, beside the image that waits for a label.

import { ask } from "./ask.js";
import { make } from "./elements.js";

const PAUSE_MS = 150; // a class that is only passed by is not asked for

export class Examples {
  constructor(box, { bearer, isKnown }) {
    this.box = box;
    this.bearer = bearer;
    this.isKnown = isKnown;
    this.found = new Map(); // what the server said, by class
    this.label = null;
    this.timer = 0;
  }

  /** Forget what was asked before: another version may be served, or another token be used. */
  clear() {
    this.found.clear();
    const label = this.label;
    this.label = null;
    this.show(label);
  }

  /** Show examples of a class; null shows none. */
  show(label) {
    if (label === this.label) return;
    this.label = label;
    clearTimeout(this.timer);
    if (label === null) this.box.hidden = true;
    else if (!this.isKnown(label)) this.draw({ pictures: [], note: "A new class: no image of it is kept." });
    else if (this.found.has(label)) this.draw(this.found.get(label));
    else this.timer = setTimeout(() => this.fetch(label), PAUSE_MS);
  }

  async fetch(label) {
    let said;
    try {
      said = await ask(`classes/examples?${new URLSearchParams({ label })}`, { bearer: this.bearer() });
      this.found.set(label, said);
    } catch (error) {
      said = { pictures: [], note: error.message };
    }
    if (label === this.label) this.draw(said);
  }

  draw({ pictures, note }) {
    const title = make("p", "about");
    title.append("Kept: ", make("bdi", "", this.label));
    const strip = make("div", "strip");
    strip.append(...pictures.map((one) => this.picture(one)));
    this.box.replaceChildren(title, pictures.length ? strip : make("p", "about", note));
    this.box.hidden = false;
  }

  picture({ type, data }) {
    const image = make("img");
    image.alt = `Kept image of ${this.label}`;
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    image.src = URL.createObjectURL(new Blob([bytes], { type }));
    image.onload = () => {
      image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < 64);
      URL.revokeObjectURL(image.src);
    };
    return image;
  }
}
