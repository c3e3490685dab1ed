// The pictures of a report: held-out images that were answered wrongly, or otherwise than before.

import { ask } from "./ask.js";
import { make, percent, sleep } from "./elements.js";

const SMALL = 48; // pixels: a smaller picture is shown with its pixels sharp
const TRIES = 3; // of a picture that a busy server sends away

const KINDS = [
  ["worse", "Got worse: right in the version before, wrong in this one.", (one) => one.before === one.label && one.answer !== one.label],
  ["better", "Got better: wrong in the version before, right in this one.", (one) => one.answer === one.label],
  ["wrong", "Answered wrongly.", (one) => one.answer !== one.label && one.before !== one.label],
];

/** Make the lists of pictures, each with an empty frame that loadPictures fills. */
export function pictureLists(report) {
  return KINDS.flatMap(([kind, says, belongs]) => {
    const found = report.pictures.filter(belongs);
    if (!found.length) return [];
    const list = make("ul", "pictures");
    list.setAttribute("aria-label", says);
    list.append(...found.map((one) => tile(one, kind)));
    return [make("p", "", says), list];
  });
}

function tile(one, kind) {
  const row = make("li");
  const figure = make("figure", kind);
  const frame = make("div", "frame", "loading…");
  frame.dataset.picture = one.number;
  frame.dataset.alt = `an image of ${one.label}`;
  const caption = make("figcaption");
  caption.append(make("bdi", "", one.label), " taken for ", make("bdi", "answer-name", one.answer), ` ${percent(one.confidence)}`);
  if (one.answer === one.label) caption.replaceChildren(make("bdi", "answer-name", one.label), ` ${percent(one.confidence)}`);
  if (one.before !== null && one.before !== one.answer && one.before !== one.label) caption.append(", before: ", make("bdi", "", one.before));
  figure.append(frame, caption);
  row.append(figure);
  return row;
}

/** Ask for one picture after the other, so that a token's rate and other readers are spared. */
export async function loadPictures(report, bearer) {
  for (const frame of document.querySelectorAll("[data-picture]")) {
    try {
      frame.replaceChildren(await picture(frame.dataset, bearer()));
    } catch (error) {
      frame.textContent = error.status === 404 ? "not kept" : error.message;
    }
  }
}

async function picture({ picture: number, alt }, bearer) {
  const image = make("img");
  image.alt = alt;
  image.src = URL.createObjectURL(await asked(`report/images/${number}`, bearer));
  await image.decode();
  URL.revokeObjectURL(image.src);
  image.classList.toggle("small", image.naturalWidth < SMALL);
  return image;
}

async function asked(path, bearer) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await ask(path, { bearer, as: "blob" });
    } catch (error) {
      if (tries === TRIES || ![429, 503].includes(error.status)) throw error;
      await sleep(1000 * error.retryAfter);
    }
  }
}
