// Files of a drop or of a choice, with the folders that they lie in.

const PHONE = /\.(heic|heif|hif|avif)$/i; // images that a browser may not know
const KNOWN = /\.(jpe?g|png|webp|gif|bmp|tiff?)$/i; // in a zip there is no type
const STRAY = /^(\.|__MACOSX$|Thumbs\.db$|desktop\.ini$)/i; // what systems put beside photos

export const isImage = ({ type = "", name }) => type.startsWith("image/") || PHONE.test(name) || KNOWN.test(name);
export const isZip = ({ type = "", name }) => /\.zip$/i.test(name) || type === "application/zip";
export const isStray = (path) => path.some((part) => STRAY.test(part));

/** The entries of a drop. They are gone after the first await of its listener. */
export const entriesOf = (transfer) => [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);

/** Call `take` with what is dropped anywhere on the page, and mark `place` while something is held above it. */
export function onDrop(place, take) {
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    place.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) place.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault(); // a browser would leave the page to show the file
    place.classList.remove("over");
    take(event.dataTransfer);
  });
}

/** List the files in entries, folder by folder: `path` and `file`. Stop when there are more than `most`. */
export async function filesIn(entries, most) {
  const waiting = entries.map((entry) => ({ entry, path: [entry.name] }));
  const found = [];
  while (waiting.length && found.length <= most) {
    const { entry, path } = waiting.shift();
    if (entry.isDirectory) {
      const inside = await entriesIn(entry, most);
      waiting.push(...inside.map((one) => ({ entry: one, path: [...path, one.name] })));
      if (waiting.length > most) return { found, isCut: true };
    } else {
      found.push({ path, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
    }
  }
  return { found, isCut: waiting.length > 0 };
}

async function entriesIn(folder, most) {
  const reader = folder.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // a hundred at a time
    found.push(...some);
    if (!some.length || found.length > most) return found.sort((a, b) => (a.name < b.name ? -1 : 1));
  }
}
