// Under an answer: the kept images that it looks like.

import { LABEL_TOKEN, READ_TOKEN, ask, token } from "./ask.js";
import { line, make, percent, show } from "./elements.js";

const WHY = 4;

/** Make the box that asks why, when it is opened. */
export function whyBox(file, version) {
  const box = make("details", "why-box");
  const summary = make("summary", "", "Why?");
  summary.append(make("span", "visually-hidden", ` ${file.name}`));
  const said = make("p", "note");
  said.setAttribute("role", "status");
  const list = make("ul", "near");
  list.setAttribute("aria-label", `Kept images that ${file.name} looks like`);
  box.append(summary, said, list);
  box.addEventListener("toggle", async () => {
    if (!box.open || list.children.length) return;
    show(said, "Comparing…");
    try {
      const body = new FormData();
      body.append("files", file, file.name);
      const { predictions } = await ask(`predict?${new URLSearchParams({ why: WHY, top_k: 1, version })}`, { method: "POST", body });
      list.replaceChildren(...predictions[0].why.map(row));
      show(said, list.children.length ? "Because it looks like these:" : "No image of the likeliest classes is kept.");
      await showPictures(list, predictions[0].why, version);
    } catch (error) {
      show(said, error.message);
    }
  });
  return box;
}

function row({ label, similarity, name }) {
  const element = line("li", "", [label, percent(similarity, 0)]);
  element.title = name;
  return element;
}

/** Show the pictures, where this page may see them. */
async function showPictures(list, near, version) {
  const bearer = token(LABEL_TOKEN) || token(READ_TOKEN);
  for (const label of new Set(near.map((one) => one.label))) {
    const query = new URLSearchParams({ label });
    for (const one of near) if (one.label === label) query.append("image", one.image);
    const { images } = await ask(`versions/${version}/kept?${query}`, { bearer }).catch(() => ({ images: [] }));
    near.forEach((one, place) => {
      const found = images.find(({ sha256 }) => sha256 === one.image);
      if (one.label !== label || !found?.data) return;
      const image = make("img");
      image.alt = found.name;
      image.src = URL.createObjectURL(new Blob([Uint8Array.from(atob(found.data), (char) => char.charCodeAt(0))], { type: found.type }));
      image.onload = () => URL.revokeObjectURL(image.src);
      list.children[place].prepend(image);
    });
  }
}
