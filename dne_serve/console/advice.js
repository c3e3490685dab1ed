// Show on the page at /label what would help the version most.

import { ask } from "./ask.js";
import { $, make, refill } from "./elements.js";

const MAX_PICTURES = 6; // beside a line

// On a phone the images come first.
$("advice-box").open = matchMedia("(min-width: 46rem)").matches;

let shown = null; // the version whose advice is shown
const addresses = []; // of the pictures that are shown

/** Show the advice on the version that the channel names; none hides the section. */
export async function showAdvice(version, bearer) {
  if (version === shown) return;
  const { advice } = version === null ? { advice: null } : await ask(`versions/${version}/advice`, { bearer });
  shown = version;
  addresses.splice(0).forEach((address) => URL.revokeObjectURL(address));
  $("advice").hidden = !advice?.lines.length;
  $("advice-about").textContent = `By the images that version ${version} was learnt from.`;
  refill($("advice-lines"), (advice?.lines ?? []).map((one) => adviceLine(one, bearer)));
}

function adviceLine({ text, images }, bearer) {
  const element = make("li");
  element.append(make("bdi", "", text));
  const items = [...new Set(images.map(({ item }) => item).filter(Boolean))].slice(0, MAX_PICTURES);
  if (items.length) {
    const strip = make("div", "strip");
    element.append(strip);
    showPictures(strip, items, bearer);
  }
  return element;
}

async function showPictures(strip, items, bearer) {
  for (const item of items) {
    const headers = bearer ? { Authorization: `Bearer ${bearer}` } : {};
    const answer = await fetch(`inbox/${item}/image`, { headers }).catch(() => null);
    if (!answer?.ok || !strip.isConnected) continue; // deleted since, or other advice is shown
    const image = make("img");
    image.alt = item;
    image.title = item;
    addresses.push((image.src = URL.createObjectURL(await answer.blob())));
    strip.append(image);
  }
}
