// Show on the page at /label what would help the version most, and the images that it speaks of. A
// click corrects the label of an image that the version keeps.

import { ask } from "./ask.js";
import { $, line, make, refill, show } from "./elements.js";

const MAX_CARDS = 36;
const MAX_PICTURES = 6; // beside a line

// On a phone the images come first.
$("advice-box").open = matchMedia("(min-width: 46rem)").matches;

let shown = null; // the version whose advice is shown
let bearer = "";
let classes = []; // of that version

/** Show the advice on the version that the channel names; none hides the section. */
export async function showAdvice(version, token) {
  if (version === shown) return;
  bearer = token;
  const { advice } = version === null ? { advice: null } : await ask(`versions/${version}/advice`, { bearer });
  shown = version;
  $("advice").hidden = !advice?.lines.length;
  $("advice-about").textContent = `By the images that version ${version} was learnt from.`;
  refill($("advice-lines"), (advice?.lines ?? []).map(adviceLine));
  $("suspects").replaceChildren();
  if (!advice) return;
  ({ classes } = await ask(`classes?version=${version}`, { bearer }));
  const cards = new Map(); // one an image that the store keeps
  const add = (image, said) => image.kept && !cards.has(image.kept) && cards.size < MAX_CARDS && cards.set(image.kept, card(image, said));
  for (const one of advice.suspects) add(one.image, { label: one.class, likelier: one.likelier });
  for (const image of advice.confused[0]?.images ?? []) add(image, { label: advice.confused[0].class, likelier: advice.confused[0].taken_for });
  for (const one of advice.copies) [one.judged, one.learnt].forEach((image) => add(image, { label: one.class, likelier: null }));
  $("suspects").append(...cards.values());
  await showPictures(version);
}

/** Make a line, with the images that the store does not keep and that are in the inbox. */
function adviceLine({ text, images }) {
  const element = make("li");
  element.append(make("bdi", "", text));
  const items = [...new Set(images.filter(({ kept }) => !kept).map(({ item }) => item).filter(Boolean))].slice(0, MAX_PICTURES);
  if (items.length) {
    const strip = make("div", "strip");
    element.append(strip);
    for (const item of items) ask(`inbox/${item}/image`, { bearer, as: "blob" }).then((bytes) => strip.append(picture(bytes, item)), () => {}); // deleted since
  }
  return element;
}

/** Make the card of an image: its picture, what is said of it, and what can be done. */
function card(image, { label, likelier }) {
  const element = make("li", "suspect");
  element.dataset.kept = image.kept;
  element.dataset.label = label;
  element.append(make("div", "frame"), line("p", "", [`labelled ${label}`, likelier ? `looks like ${likelier}` : "nearly a copy"]));
  const buttons = make("div", "buttons");
  if (likelier) buttons.append(button(`It is ${likelier}`, () => correct(element, likelier)));
  const others = make("select");
  others.setAttribute("aria-label", `Another class for this image of ${label}`);
  const names = classes.map((one) => one.label).filter((name) => name !== label && name !== likelier);
  others.append(make("option", "", "another…"), ...names.map((name) => make("option", "", name)));
  others.addEventListener("change", () => others.selectedIndex && correct(element, others.value));
  buttons.append(others, button("Take it out", () => correct(element, null)));
  const said = make("p", "note");
  said.setAttribute("role", "status");
  element.append(buttons, said);
  return element;
}

function button(text, action) {
  const element = Object.assign(make("button", "", text), { type: "button" });
  element.addEventListener("click", action);
  return element;
}

async function correct(element, to) {
  const { kept: image, label } = element.dataset;
  const said = element.querySelector("[role=status]");
  try {
    await ask("corrections", { method: "POST", bearer, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ image, label, to }) });
    const back = button("Undo", () => correct(element, label));
    said.replaceChildren(to === label ? "Taken back." : to === null ? "Will be taken out. " : `Will be ${to}. `, to === label ? "" : back);
    document.dispatchEvent(new Event("labelled"));
  } catch (error) {
    show(said, error.message);
  }
}

/** Fetch the pictures of all cards, one question a class. */
async function showPictures(version) {
  const cards = [...$("suspects").children];
  for (const label of new Set(cards.map((element) => element.dataset.label))) {
    const mine = cards.filter((element) => element.dataset.label === label);
    const query = new URLSearchParams({ label });
    for (const kept of new Set(mine.map((element) => element.dataset.kept))) query.append("image", kept);
    const { images } = await ask(`versions/${version}/kept?${query}`, { bearer }).catch(() => ({ images: [] }));
    for (const element of mine) {
      const found = images.find(({ sha256 }) => sha256 === element.dataset.kept);
      if (!found) element.remove(); // it is not kept any more
      else if (found.data) element.firstChild.append(picture(new Blob([Uint8Array.from(atob(found.data), (char) => char.charCodeAt(0))], { type: found.type }), found.name));
    }
  }
}

function picture(bytes, name) {
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
