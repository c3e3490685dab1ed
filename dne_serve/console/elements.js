// Building blocks of both pages. Class names, file names and reasons come from strangers: they
// reach a page as text only.

export const $ = (id) => document.getElementById(id);

/** Make an element; `text` becomes its text and never markup. */
export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Make an element with sentences in which `this` is code. */
export function prose(tag, className, text) {
  const element = make(tag, className);
  text.split("`").forEach((part, i) => element.append(i % 2 ? make("code", "", part) : part));
  return element;
}

/** Make a line of parts, each written in its own direction: a Hebrew name must not move a number. */
export function line(tag, className, parts) {
  const element = make(tag, className);
  parts.filter(Boolean).forEach((part, i) => element.append(i ? make("span", "sep", " · ") : "", make("bdi", "", part)));
  return element;
}

/** Show a sentence, or hide the element that has none. */
export function show(element, text) {
  element.textContent = text ?? "";
  element.hidden = !text;
}

/** Replace what an element holds, and keep the focus on the control that had it. */
export function refill(element, children) {
  const id = document.activeElement?.id;
  element.replaceChildren(...children);
  if (id && document.activeElement?.id !== id) $(id)?.focus();
}

export const percent = (share, decimals = 1) => `${(100 * share).toFixed(decimals)}\u00a0%`;
/** Write a number with so many digits, and never with an exponent. */
export const figure = (value, digits) => (value && Math.abs(value) < 0.001 ? "under 0.001" : String(Number(value.toPrecision(digits))));
export const count = (n, one, many) => `${n} ${n === 1 ? one : many}`;
export const size = (bytes) => (bytes < 2 ** 20 ? `${(bytes / 2 ** 10).toFixed(1)}\u00a0KiB` : `${(bytes / 2 ** 20).toFixed(2)}\u00a0MiB`);
const dates = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" }); // costs more than all dates of a page
export const when = (time) => (Number.isNaN(Date.parse(time)) ? String(time) : dates.format(new Date(time)));
export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)}\u00a0ms` : `${(ms / 1000).toFixed(1)}\u00a0s`);
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
