// The sections of a report, made from its JSON. Every name of a class or task is text.

import { count, make, percent, size } from "./elements.js";
import { histogram, key, lines, matrix, reliability } from "./plots.js";
import { pictureLists } from "./report_pictures.js";

const ROWS = 50; // of a table, until more are asked for
const BADGES = { passed: "badge", refused: "badge refused", overruled: "badge overruled", "not judged": "badge not-judged" };
const SOURCES = {
  "held-out": (images) => `Judged by ${count(images, "held-out image", "held-out images")}, which no version was trained on.`,
  validation: (images) => `Judged by ${count(images, "image", "images")} that were given for it and are not in the store.`,
  none: () => "No images were there to judge by.",
};

const dash = "–";
const share = (one) => (one ? percent(one.share) : dash);
const interval = (one) => (one?.images ? `${percent(one.low)} to ${percent(one.high)} of ${count(one.images, "image", "images")}` : "");
const decimal = (value) => (value === null ? dash : value.toFixed(3));
const million = (value) => `${(value / 1e6).toFixed(2)}\u00a0M`;

/** Make all sections that have something to tell. */
export function sections(report) {
  const measured = report.accuracy.all !== null;
  return [
    summary(report),
    pictures(report),
    ...(measured ? [tasks(report)] : []),
    growth(report),
    ...(measured ? [classes(report), confusion(report)] : []),
    ...(report.calibration.images ? [calibration(report)] : []),
    ...(report.unknown ? [unknown(report)] : []),
    training(report),
  ];
}

function section(title, says, ...content) {
  const element = make("section");
  const heading = make("h2", "", title);
  heading.id = `about-${title.toLowerCase().replaceAll(" ", "-")}`;
  element.setAttribute("aria-labelledby", heading.id);
  element.append(heading, ...(says ? [make("p", "", says)] : []), ...content);
  return element;
}

function summary(report) {
  const head = make("div", "head");
  head.append(make("span", BADGES[report.gate], report.gate), make("bdi", "", report.change));
  const notes = make("ul", "notes");
  notes.append(...report.notes.map((one) => make("li", "", one)));
  const made = section("Verdict", SOURCES[report.source]?.(report.images) ?? "", head);
  if (report.reasons.length) made.append(reasons(report));
  if (report.notes.length) made.append(notes);
  if (report.got_worse + report.got_better) {
    made.append(make("p", "", `Of the images of old classes ${report.got_worse} got worse and ${report.got_better} got better.`));
  }
  made.append(tiles(report));
  return made;
}

function reasons(report) {
  const list = make("ul", "error notes");
  list.setAttribute("aria-label", "Why the gate refused this version");
  list.append(...report.reasons.map((one) => make("li", "", one)));
  return list;
}

function tiles(report) {
  const { all, old, new: fresh, parent_old: before } = report.accuracy;
  const newest = report.growth.at(-1);
  const list = make("dl", "tiles");
  const add = (name, value, more) => {
    const tile = make("div");
    tile.append(make("dt", "", name), make("dd", "amount", value), make("dd", "more", more));
    list.append(tile);
  };
  add("accuracy", share(all), interval(all));
  if (old) add("old classes", share(old), [interval(old), before ? `before: ${share(before)}` : ""].filter(Boolean).join("; "));
  if (fresh) add("new classes", share(fresh), interval(fresh));
  add("size", size(newest.total_bytes), newest.delta_bytes ? `new: ${size(newest.delta_bytes)}` : "no new weights");
  add("parameters", million(newest.parameters), `${newest.gflop.toPrecision(3)} GFLOP an image`);
  const { latency } = report;
  if (latency) add("latency", `${latency.milliseconds.toPrecision(2)}\u00a0ms`, `an image on one core of the trainer${latency.version === report.version ? "" : `, measured for version ${latency.version}`}`);
  return list;
}

function pictures(report) {
  const made = section("Images", report.pictures.length ? "Some held-out images as the network sees them, the most certain answers first." : "");
  made.append(...pictureLists(report));
  if (report.pictures_note) made.append(make("p", "", report.pictures_note));
  if (report.flipped.length) {
    const rows = report.flipped.map((one) => [one.class, one.before, one.after, String(one.count)]);
    made.append(table("Answers that changed", ["class", "answer before", "answer now", "images"], rows, 3));
  }
  return made;
}

function tasks(report) {
  const versions = report.growth.map((one) => `v${one.version}`);
  const drawn = report.tasks.every((one) => one.accuracy !== null);
  const rows = report.tasks.map((one) => [one.name, String(one.classes), cell(one.learnt), cell(one.now), forgotten(one)]);
  const made = section("Tasks", "Accuracy of each task in every version since it was learnt, as it was measured then: later versions have more answers to choose from.");
  if (drawn) {
    const series = report.tasks.map((one) => ({ name: one.name, points: one.accuracy.map((value) => (value === null ? null : { value })) }));
    made.append(lines({ title: "Accuracy of each task over the versions", series, labels: versions, below: "version", format: (one) => percent(one, 0), top: 1 }), key(report.tasks.map((one) => one.name)));
  }
  made.append(table("Tasks", ["task", "classes", "when learnt", "now", "points forgotten"], rows));
  return made;
}

const forgotten = ({ learnt, now }) => (learnt && now ? (100 * (learnt.share - now.share)).toFixed(1) : dash);

function cell(one) {
  if (!one) return dash;
  const made = make("span", "", percent(one.share));
  if (one.images) made.append(make("small", "", `${percent(one.low, 0)}–${percent(one.high, 0)} of ${one.images}`));
  return made;
}

function growth(report) {
  const last = new Map(report.growth.map((one) => [one.tasks, one])); // the newest version with so many tasks
  const points = [...last.values()];
  const labels = points.map((one) => String(one.tasks));
  const plot = (title, value, format, top) => {
    const made = make("div");
    const series = [{ name: title, points: points.map((one) => value(one)) }];
    made.append(make("h3", "", title), lines({ title: `${title} by number of tasks`, series, labels, below: "tasks", format, top }));
    return made;
  };
  const most = (value) => 1.1 * Math.max(...points.map(value), 1e-12);
  const plots = make("div", "side");
  if (points.some((one) => one.accuracy)) {
    plots.append(plot("Accuracy", ({ accuracy: one }) => one && { value: one.share, low: one.low, high: one.high }, (one) => percent(one, 0), 1));
  }
  plots.append(
    plot("Parameters", (one) => ({ value: one.parameters }), (one) => `${(one / 1e6).toPrecision(2)}\u00a0M`, most((one) => one.parameters)),
    plot("GFLOP an image", (one) => ({ value: one.gflop }), (one) => one.toPrecision(2), most((one) => one.gflop)),
  );
  const rows = report.growth.toReversed().map((one) => [
    String(one.version), one.change, String(one.tasks), String(one.classes), million(one.parameters),
    one.gflop.toPrecision(3), size(one.total_bytes), size(one.delta_bytes), cell(one.accuracy),
  ]);
  const titles = ["version", "what", "tasks", "classes", "parameters", "GFLOP", "size", "new", "accuracy then"];
  return section("Growth", "The lineage of this version. Accuracy was measured when each version was made; the lines through the dots are 95 % intervals.", plots, table("Growth", titles, rows, 2));
}

function classes(report) {
  const rows = report.classes.map((one) => [one.label, one.task, cell(one.right), cell(one.precision)]);
  const made = section("Classes", "Right: the share of a class's images that were answered with the class. Precision: the share of a class's answers that were right. Below each is its 95 % interval.");
  if (report.classes.length < report.all_classes) made.append(make("p", "", `The ${report.classes.length} worst of ${report.all_classes} classes.`));
  if (report.retired.length) made.append(make("p", "", `Retired, and never answered: ${report.retired.join(", ")}.`));
  made.append(table("Classes", ["class", "task", "right", "precision"], rows, 2));
  return made;
}

function confusion(report) {
  const beside = make("div", "side");
  if (report.matrix) beside.append(matrix({ title: "Confusion matrix: rows are classes, columns are answers", counts: report.matrix, names: report.classes.map((one) => one.label) }));
  const rows = report.confused.map((one) => [one.label, one.taken_for, String(one.images)]);
  if (rows.length) beside.append(table("Classes that were confused", ["is", "taken for", "images"], rows, 2));
  const says = rows.length ? "Rows are the classes of the images and columns the answers, in the order of the classes above." : "No image was taken for another class, as far as it is recorded.";
  return section("Confusion", says, beside);
}

function calibration(report) {
  const { temperature, before, after, bins, images } = report.calibration;
  const says = `How often answers of a confidence are right. On the dashed line the two agree; below it answers are too sure. ${count(images, "image was", "images were")} measured, each with a temperature that was fitted to the others.`;
  const beside = make("div", "side");
  if (bins.length) beside.append(reliability({ title: "Right answers over confidence", bins }));
  const rows = bins.map((one) => [`${percent(one.low, 0)} to ${percent(one.high, 0)}`, String(one.right.images), percent(one.confidence), cell(one.right)]);
  const tables = make("div");
  if (bins.length) tables.append(table("Calibration by confidence", ["confidence", "images", "mean", "right"], rows));
  else tables.append(make("p", "note", "Older software made this version: it recorded no counts."));
  beside.append(tables);
  const errors = `Expected calibration error ${decimal(after.all)}, and ${decimal(before.all)} without the temperature of ${temperature.toPrecision(3)}; 0 is perfect.`;
  return section("Calibration", says, make("p", "plain", errors), beside);
}

function unknown(report) {
  const { score, threshold, rate, images, scores } = report.unknown;
  const says = `An image whose score (${score}) is below ${threshold.toPrecision(3)} is answered as unknown. The threshold was set by ${count(images, "held-out image", "held-out images")} so that about ${percent(rate)} of known images fall below it.`;
  if (!scores) return section("Unknown images", says, make("p", "note", "Older software made this version: it recorded no scores."));
  return section("Unknown images", says, histogram({ title: "Scores of held-out images", threshold, ...scores }));
}

function training(report) {
  const { run, training: figures } = report;
  const list = make("dl", "run");
  const add = (name, value) => list.append(make("dt", "", name), value instanceof Node ? value : make("dd", "", value));
  if (run) {
    const command = make("dd");
    command.append(make("code", "", run.command || "none: it was called as a function"));
    add("command", command);
    add("seed", String(run.seed));
    add("time", run.seconds < 60 ? `${run.seconds.toFixed(1)}\u00a0s` : `${(run.seconds / 60).toFixed(1)} minutes`);
    add("machine", run.machine || dash);
  }
  add("software", report.software);
  for (const [name, value] of Object.entries(figures)) if (value !== null && !(run && name === "seed")) add(name.replaceAll("_", " "), String(value));
  const says = run ? "" : report.gate === "not judged" && !Object.keys(figures).length ? "Nothing was learnt in this version." : "Older software made this version: it recorded neither command nor time.";
  return section("How it was trained", says, list);
}

/** Make a table of texts and elements. The first `names` columns are text, the others figures. */
function table(label, titles, rows, names = 1) {
  const box = make("div", "scroll");
  box.tabIndex = 0; // a keyboard can scroll it
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", `Table: ${label}`); // the section around it has the name alone
  const made = make("table");
  const head = make("tr");
  head.append(...titles.map((title, i) => make("th", i < names ? "name" : "", title)));
  const body = make("tbody");
  const line = (row) => {
    const element = make("tr");
    element.append(...row.map((part, i) => {
      const one = make("td", i < names ? "name" : "");
      one.append(part instanceof Node ? part : make("bdi", "", part));
      return one;
    }));
    return element;
  };
  body.append(...rows.slice(0, ROWS).map(line));
  const top = make("thead");
  top.append(head);
  made.append(top, body);
  box.append(made);
  if (rows.length > ROWS) {
    const more = make("button", "", `Show all ${rows.length}`);
    more.type = "button";
    more.addEventListener("click", () => {
      body.append(...rows.slice(ROWS).map(line));
      more.remove();
    });
    box.append(more);
  }
  return box;
}
