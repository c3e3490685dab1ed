// Show on the page at /label what would help the version most, and the images that it speaks of.

import { ask } from "./ask.js";
import { picture, showSuspects } from "./correct.js";
import { $, make, refill } from "./elements.js";

const MAX_PICTURES = 6; // beside a line

// On a phone the images come first.
$("advice-box").open = matchMedia("(min-width: 46rem)").matches;

let shown = null; // the version whose advice is shown
let bearer = "";

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
  if (advice) await showSuspects($("suspects"), advice, { version, bearer });
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
