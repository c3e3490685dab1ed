// Correct the labels of images that a version keeps: beside the advice on the page at /label, and on
// the page of a report.

import { LABEL_TOKEN, READ_TOKEN, ask, token } from "./ask.js";
import { $, line, make, show } from "./elements.js";

const MAX_CARDS = 36;

/** Fill a list with the images that an advice speaks of. `root` leads from the page to the server. */
export async function showSuspects(list, advice, { version, bearer, root = "" }) {
  const classes = await classesOf(version, { bearer, root });
  const cards = new Map(); // one an image that the store keeps
  const add = ({ kept }, said) => kept && !cards.has(kept) && cards.size < MAX_CARDS && cards.set(kept, card(kept, said, { classes, bearer, root }));
  for (const one of advice.suspects) add(one.image, { label: one.class, likelier: one.likelier });
  for (const image of advice.confused[0]?.images ?? []) add(image, { label: advice.confused[0].class, likelier: advice.confused[0].taken_for });
  for (const one of advice.copies) [one.judged, one.learnt].forEach((image) => add(image, { label: one.class, likelier: null }));
  list.replaceChildren(...cards.values());
  await showPictures([...cards.values()], { version, bearer, root });
}

/** Add to the page of a report what needs the scope label: the advice and, if the channel names the
 * version, corrections. */
export async function offerCorrections(version) {
  const asking = { version, bearer: token(LABEL_TOKEN) || token(READ_TOKEN), root: "../../" };
  const { bearer, root } = asking;
  const may = await ask(`${root}jobs?limit=1`, { bearer }).catch(() => null);
  if (!may) return;
  const { advice } = await ask(`${root}versions/${version}/advice`, { bearer });
  const list = advise(advice);
  if (may.head !== version) return;
  const classes = await classesOf(version, asking);
  for (const frame of document.querySelectorAll(".pictures [data-kept]")) frame.parentElement.append(boxUnder(frame.dataset, { classes, bearer, root }));
  const says = make("p", "", "A click moves an image to another class, or takes it out. The next version is learnt without the error: ");
  says.append(Object.assign(make("a", "", "Learn"), { href: `${root}label` }), ".");
  list.before(says);
  if (advice) await showSuspects(list, advice, asking);
}

/** Add the section of the advice, and return its list of images, which is empty yet. */
function advise(advice) {
  const made = make("section");
  const heading = Object.assign(make("h2", "", "What would help most"), { id: "about-advice" });
  made.setAttribute("aria-labelledby", heading.id);
  const lines = make("ul", "notes");
  lines.append(...(advice?.lines ?? []).map(({ text }) => make("li", "", text)));
  const list = make("ul", "suspects");
  list.setAttribute("aria-label", "Images to look at");
  made.append(heading, lines, list);
  if (!advice) lines.replaceWith(make("p", "", "There is no advice on this version."));
  $("about-images").parentElement.after(made);
  return list;
}

/** Make the box under a picture of a report. */
function boxUnder({ kept: image, label, answer }, asking) {
  const box = make("details", "wrong");
  const summary = make("summary", "", "Wrong label?");
  box.append(summary);
  const fill = () => box.append(...correction({ image, label, likelier: answer === label ? null : answer }, asking));
  box.addEventListener("toggle", fill, { once: true }); // a list of all classes under each picture would be long
  return box;
}

async function classesOf(version, { bearer, root }) {
  const { classes } = await ask(`${root}classes?version=${version}`, { bearer });
  return classes.map(({ label }) => label);
}

/** Make the card of an image: its picture, what is said of it, and what can be done. */
function card(image, { label, likelier }, asking) {
  const element = make("li", "suspect");
  Object.assign(element.dataset, { kept: image, label });
  element.append(make("div", "frame"), line("p", "", [`labelled ${label}`, likelier ? `looks like ${likelier}` : "nearly a copy"]), ...correction({ image, label, likelier }, asking));
  return element;
}

/** Make the buttons that correct an image, and the line that says what was done. */
function correction({ image, label, likelier }, { classes, bearer, root }) {
  const said = make("p", "note");
  said.setAttribute("role", "status");
  const correct = async (to) => {
    try {
      await ask(`${root}corrections`, { method: "POST", bearer, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ image, label, to }) });
      const back = button("Undo", () => correct(label));
      said.replaceChildren(to === label ? "Taken back." : to === null ? "Will be taken out. " : `Will be ${to}. `, to === label ? "" : back);
      document.dispatchEvent(new Event("labelled"));
    } catch (error) {
      show(said, error.message);
    }
  };
  const buttons = make("div", "buttons");
  if (likelier) buttons.append(button(`It is ${likelier}`, () => correct(likelier)));
  const others = make("select");
  others.setAttribute("aria-label", `Another class for this image of ${label}`);
  const names = classes.filter((name) => name !== label && name !== likelier);
  others.append(make("option", "", "another…"), ...names.map((name) => make("option", "", name)));
  others.addEventListener("change", () => others.selectedIndex && correct(others.value));
  buttons.append(others, button("Take it out", () => correct(null)));
  return [buttons, said];
}

function button(text, action) {
  const element = Object.assign(make("button", "", text), { type: "button" });
  element.addEventListener("click", action);
  return element;
}

/** Fetch the pictures of all cards, one question a class. */
async function showPictures(cards, { version, bearer, root }) {
  for (const label of new Set(cards.map((element) => element.dataset.label))) {
    const mine = cards.filter((element) => element.dataset.label === label);
    const query = new URLSearchParams({ label });
    for (const kept of new Set(mine.map((element) => element.dataset.kept))) query.append("image", kept);
    const { images } = await ask(`${root}versions/${version}/kept?${query}`, { bearer }).catch(() => ({ images: [] }));
    for (const element of mine) {
      const found = images.find(({ sha256 }) => sha256 === element.dataset.kept);
      if (!found) element.remove(); // it is not kept any more
      else if (found.data) element.firstChild.append(picture(new Blob([Uint8Array.from(atob(found.data), (char) => char.charCodeAt(0))], { type: found.type }), found.name));
    }
  }
}

/** Make an image of bytes that a reader can name. */
export function picture(bytes, name) {
  const image = make("img");
  image.alt = name;
  image.title = name;
  image.src = URL.createObjectURL(bytes);
  image.onload = () => {
    if (Math.max(image.naturalWidth, image.naturalHeight) < 64) image.classList.add("small");
    URL.revokeObjectURL(image.src);
  };
  return image;
}
