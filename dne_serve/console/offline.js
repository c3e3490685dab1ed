// One banner while the server cannot be reached, and how long to wait before the next try.

import { $, show } from "./elements.js";

const FIRST_MS = 1000;
const LONGEST_MS = 30_000;
const GONE = "The server cannot be reached. This page goes on by itself when the server is back.";

let gone = false;

document.addEventListener("unreachable", () => {
  if (gone) return;
  gone = true;
  show($("offline"), GONE);
});
document.addEventListener("reached", () => {
  if (!gone) return;
  gone = false;
  show($("offline"), "");
  document.dispatchEvent(new Event("server-back"));
});

/** Give the time to wait after so many failures: longer each time, and never the same for all. */
export function pause(failures) {
  const longest = Math.min(FIRST_MS * 2 ** failures, LONGEST_MS);
  return longest * (0.5 + Math.random() / 2);
}
