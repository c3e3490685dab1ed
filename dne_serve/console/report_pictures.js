// The pictures of a report: held-out images that were answered wrongly, or otherwise than before.

import { ask } from "./ask.js";
import { make, percent, sleep } from "./elements.js";

const SMALL = 48; // pixels: a smaller picture is shown with its pixels sharp
const TRIES = 3; // of a picture that a busy server sends away

const KINDS = [
  ["worse", "Got worse: right in the version before, wrong in this one.", ({ label, answer, before }) => before === label && answer !== label],
  ["better", "Got better: wrong in the version before, right in this one.", ({ label, answer }) => answer === label],
  ["wrong", "Answered wrongly.", ({ label, answer, before }) => answer !== label && before !== label],
];

/** Make the lists of pictures. A picture that is not inside the facts gets an empty frame, which
 * loadPictures fills. */
export function pictureLists(report) {
  return KINDS.flatMap(([kind, says, belongs]) => {
    const shown = report.pictures.filter(belongs);
    if (!shown.length) return [];
    const list = make("ul", "pictures");
    list.setAttribute("aria-label", says);
    list.append(...shown.map((picture) => tile(picture, kind)));
    return [make("p", "", says), list];
  });
}

function tile(picture, kind) {
  const row = make("li");
  const figure = make("figure", kind);
  figure.append(frameOf(picture), captionOf(picture));
  row.append(figure);
  return row;
}

function frameOf({ number, label, answer, src }) {
  const frame = make("div", "frame", src === null ? "not kept" : "loading…");
  const alt = `an image of ${label}`;
  if (src === undefined) Object.assign(frame.dataset, { picture: number, alt, label, answer });
  if (src) imageFrom(src, alt).then((image) => frame.replaceChildren(image));
  return frame;
}

function captionOf({ label, answer, before, confidence }) {
  const caption = make("figcaption");
  if (answer !== label) caption.append(make("bdi", "", label), " taken for ");
  caption.append(make("bdi", "answer-name", answer), ` ${percent(confidence)}`);
  if (before !== null && before !== answer && before !== label) caption.append(", before: ", make("bdi", "", before));
  return caption;
}

/** Ask for one picture after the other, to spare a token's rate and other readers. */
export async function loadPictures(bearer) {
  for (const frame of document.querySelectorAll("[data-picture]")) {
    try {
      const answer = await asked(`report/images/${frame.dataset.picture}`, bearer());
      frame.dataset.kept = answer.headers.get("Dne-Kept"); // what a correction names
      frame.replaceChildren(await picture(await answer.blob(), frame.dataset.alt));
    } catch (error) {
      frame.textContent = error.status === 404 ? "not kept" : error.message;
    }
  }
}

async function picture(bytes, alt) {
  const src = URL.createObjectURL(bytes);
  const image = await imageFrom(src, alt);
  URL.revokeObjectURL(src);
  return image;
}

async function imageFrom(src, alt) {
  const image = make("img");
  Object.assign(image, { alt, src });
  await image.decode();
  image.classList.toggle("small", image.naturalWidth < SMALL);
  return image;
}

async function asked(path, bearer) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await ask(path, { bearer, as: "answer" });
    } catch (error) {
      if (tries === TRIES || ![429, 503].includes(error.status)) throw error;
      await sleep(1000 * error.retryAfter);
    }
  }
}
