// The tree of versions beside their list: a rail for each branch, a dot for each version. It is an
// ornament: the list says in words on which version another one was built.

import { make } from "./elements.js";

const MOST_LANES = 5; // further branches share the last rail

/** Give each version of a list, newest first, its place in the tree. `edge`: versions below this
 * number are not listed yet, so that a rail to one goes on; a rail to a deleted version ends. */
export function treeOf(rows, edge) {
  const listed = new Set(rows.map((one) => one.version));
  const lanes = []; // the version that each rail leads to; null: the rail is free
  return rows.map(({ version, parent }) => {
    const ending = lanes.flatMap((wanted, lane) => (wanted === version ? [lane] : []));
    const free = lanes.indexOf(null);
    const lane = ending[0] ?? (free < 0 ? lanes.length : free);
    const joins = ending.slice(1);
    for (const one of joins) lanes[one] = null;
    const goesOn = parent !== null && (listed.has(parent) || parent < edge);
    lanes[lane] = goesOn ? parent : null;
    const through = lanes.flatMap((wanted, one) => (wanted !== null && one !== lane ? [one] : []));
    return { lane, joins, through, up: ending.length > 0, down: goesOn };
  });
}

/** Count the rails that a tree needs. */
export function lanesOf(tree) {
  return Math.min(MOST_LANES, 1 + Math.max(0, ...tree.flatMap((one) => [one.lane, ...one.joins, ...one.through])));
}

/** Draw the part of the tree that stands beside one version. */
export function rail({ lane, joins, through, up, down }) {
  const element = make("span", "rail");
  element.setAttribute("aria-hidden", "true");
  const add = (className, at) => {
    const part = make("i", className);
    part.style.setProperty("--lane", Math.min(at, MOST_LANES - 1));
    element.append(part);
    return part;
  };
  for (const one of through) add("through", one);
  if (up) add("up", lane);
  if (down) add("down", lane);
  for (const one of joins) {
    add("up", one);
    add("across", lane).style.setProperty("--to", Math.min(one, MOST_LANES - 1));
  }
  add("dot", lane);
  return element;
}
