// Small plots as SVG. A viewBox is about as wide as a phone, so that its text stays readable there.
// Names come from strangers: they reach a plot as text only.

import { $, make, percent } from "./elements.js";

const SVG = $("drawing").namespaceURI; // the page has an empty drawing
const WIDTH = 340;
const HEIGHT = 190;
const LEFT = 46;
const RIGHT = 22;
const TOP = 12;
const BOTTOM = 36;
const MOST_LABELS = 8;
const CELL_WITH_COUNT = 17; // pixels: a smaller cell has no room for its number
const CELL_WITH_NAME = 12;
const LETTER = 6.2; // pixels: the width of most letters
const MOST_LETTERS = 18; // of a name beside a matrix
const SERIES = 6; // colours of report.css; further lines repeat them

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function frame(title, { width = WIDTH, height = HEIGHT } = {}) {
  const svg = draw("svg", { role: "img", viewBox: `0 0 ${width} ${height}`, class: "plot" });
  svg.append(draw("title", {}, title));
  return svg;
}

const text = (x, y, said, anchor = "middle") => draw("text", { x, y, "text-anchor": anchor }, said);
const across = (share) => LEFT + (WIDTH - LEFT - RIGHT) * share;
const up = (share) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share);

function rules(svg, format, top) {
  for (const share of [0, 0.5, 1]) {
    svg.append(draw("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: up(share), y2: up(share) }));
    svg.append(text(LEFT - 6, up(share) + 4, format(top * share), "end"));
  }
}

function whisker(x, low, high, kind) {
  return draw("line", { class: `whisker ${kind}`, x1: x, x2: x, y1: up(low), y2: up(high) });
}

/** Draw lines over places. A point is null, or {value, low, high}; the last two may be missing. */
export function lines({ title, series, labels, below, format, top }) {
  const svg = frame(title);
  rules(svg, format, top);
  const place = (i) => (labels.length === 1 ? across(0.5) : across(i / (labels.length - 1)));
  const every = Math.ceil(labels.length / MOST_LABELS);
  labels.forEach((label, i) => i % every || svg.append(text(place(i), HEIGHT - 20, label)));
  svg.append(text(across(0.5), HEIGHT - 4, below));
  series.forEach(({ name, points }, index) => {
    const kind = `s${index % SERIES}`;
    const drawn = points.map((point, i) => point && { ...point, x: place(i) }).filter(Boolean);
    svg.append(draw("polyline", { class: `line ${kind}`, points: drawn.map(({ x, value }) => `${x.toFixed(1)},${up(value / top).toFixed(1)}`).join(" ") }));
    for (const { x, value, low, high } of drawn) {
      if (low !== undefined && low !== null) svg.append(whisker(x, low / top, high / top, kind));
      const dot = draw("circle", { class: `dot ${kind}`, cx: x, cy: up(value / top), r: 4 });
      dot.append(draw("title", {}, `${name}: ${format(value)}`));
      svg.append(dot);
    }
  });
  return svg;
}

/** Draw the share of right answers over confidence, with its interval; on the diagonal they agree. */
export function reliability({ title, bins }) {
  const svg = frame(title);
  rules(svg, (share) => percent(share, 0), 1);
  svg.append(draw("line", { class: "ideal", x1: across(0), y1: up(0), x2: across(1), y2: up(1) }));
  for (const { confidence, right } of bins) {
    const x = across(confidence);
    const dot = draw("circle", { class: "dot s0", cx: x, cy: up(right.share), r: 5 });
    dot.append(draw("title", {}, `${right.images} images: confidence ${percent(confidence)}, right ${percent(right.share)}`));
    svg.append(whisker(x, right.low, right.high, "s0"), dot);
  }
  for (const share of [0, 0.5, 1]) svg.append(text(across(share), HEIGHT - 20, percent(share, 0)));
  svg.append(text(across(0.5), HEIGHT - 4, "confidence"));
  return svg;
}

/** Draw counts of scores; those below the threshold are answered as unknown. */
export function histogram({ title, low, high, counts, threshold }) {
  const svg = frame(title);
  const most = Math.max(1, ...counts);
  rules(svg, (count) => String(Math.round(count * 10) / 10), most);
  const at = (score) => across((score - low) / (high - low || 1));
  const width = (across(1) - across(0)) / counts.length;
  counts.forEach((count, i) => {
    const from = low + ((high - low) * i) / counts.length;
    const kind = from + (high - low) / counts.length <= threshold ? "below" : "known";
    const bar = draw("rect", { class: kind, x: at(from), y: up(count / most), width: Math.max(1, width - 1), height: up(0) - up(count / most) });
    bar.append(draw("title", {}, `${count} from ${from.toFixed(2)}`));
    svg.append(bar);
  });
  if (threshold >= low && threshold <= high) {
    svg.append(draw("line", { class: "threshold", x1: at(threshold), x2: at(threshold), y1: up(1), y2: up(0) }));
  }
  for (const share of [0, 0.5, 1]) svg.append(text(across(share), HEIGHT - 20, (low + (high - low) * share).toFixed(2)));
  svg.append(text(across(0.5), HEIGHT - 4, "score of held-out images"));
  return svg;
}

/** Draw classes as rows and answers as columns; a cell is as dark as its share of the row. */
export function matrix({ title, counts, names }) {
  const cell = Math.max(8, Math.min(30, 300 / Math.max(1, names.length)));
  const side = cell * names.length;
  const named = cell >= CELL_WITH_NAME;
  const longest = Math.max(0, ...names.map((name) => shortened(name).length));
  const margin = named ? 12 + LETTER * longest : 24;
  const svg = frame(title, { width: side + margin + 4, height: side + margin + 4 });
  svg.classList.add("matrix");
  svg.append(draw("rect", { class: "empty", x: margin, y: margin, width: side, height: side }));
  if (named) svg.append(...names.flatMap((name, i) => namesOf(name, margin, margin + cell * (i + 0.5) + 4)));
  else svg.append(text(margin + side / 2, 14, "answer"), sideways(14, margin + side / 2, "class", "middle"));
  counts.forEach((row, r) => {
    const total = row.reduce((sum, count) => sum + count, 0);
    row.forEach((count, c) => {
      if (!count) return;
      const part = draw("g", {});
      part.append(draw("title", {}, `${count} of ${total}: ${names[r]} ${r === c ? "recognised" : `taken for ${names[c]}`}`));
      const [x, y] = [margin + cell * c, margin + cell * r];
      part.append(draw("rect", { class: r === c ? "right" : "wrong", "fill-opacity": (0.25 + (0.75 * count) / total).toFixed(2), x, y, width: cell - 1, height: cell - 1 }));
      if (cell >= CELL_WITH_COUNT) part.append(draw("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle", class: count / total > 0.5 ? "on" : "" }, String(count)));
      svg.append(part);
    });
  });
  return svg;
}

/** Write a class before its row and above its column. */
const namesOf = (name, margin, at) => [text(margin - 5, at, shortened(name), "end"), sideways(at, margin - 5, shortened(name), "start")];
const sideways = (x, y, said, anchor) => draw("text", { transform: `translate(${x} ${y}) rotate(-90)`, "text-anchor": anchor }, said);
const shortened = (name) => {
  const letters = [...name];
  return letters.length <= MOST_LETTERS ? name : `${letters.slice(0, MOST_LETTERS - 1).join("")}…`;
};

/** List the names of lines beside their colours. */
export function key(names) {
  const list = make("ul", "key");
  names.forEach((name, i) => {
    const row = make("li");
    row.append(make("i", `s${i % SERIES}`), make("bdi", "", name));
    list.append(row);
  });
  return list;
}
