// The sections of a report, made from its facts. Every name of a class or task is text.
// `measured_anew`, `levels` and `advice` are in written reports only.

import { count, figure, make, percent, size, when } from "./elements.js";
import { histogram, key, lines, matrix, reliability } from "./plots.js";
import { pictureLists } from "./report_pictures.js";

const ROWS = 50; // of a table, until more are asked for
const BADGES = { passed: "badge", refused: "badge refused", overruled: "badge overruled", "not judged": "badge not-judged" };
const SOURCES = {
  "held-out": (images) => `Judged by ${count(images, "held-out image", "held-out images")}, which no version was trained on.`,
  validation: (images) => `Judged by ${count(images, "image", "images")} that were given for it and are not in the store.`,
  none: () => "No images were there to judge by.",
};
const FORECASTS = "Forecasts from the images of the run: a classifier on the same features learnt from a quarter, half and all images of a class, and judged the images that were left out.";
const ANEW = "All shares are measured anew, on the images that the store holds now.";

const dash = "–";
const share = (measured) => (measured ? percent(measured.share) : dash);
const interval = (measured) => (measured?.images ? `${percent(measured.low)} to ${percent(measured.high)} of ${count(measured.images, "image", "images")}` : "");
const decimal = (value) => (value === null ? dash : value.toFixed(3));
const million = (value) => `${(value / 1e6).toFixed(2)}\u00a0M`;
const points = (value) => (value === null ? dash : (100 * value).toFixed(1));

/** Make all sections that have something to tell. */
export function sections(report) {
  const measured = report.accuracy.all !== null;
  return [
    summary(report),
    pictures(report),
    ...(report.advice?.lines.length ? [advice(report.advice)] : []),
    ...(measured ? [tasks(report)] : []),
    growth(report),
    ...(measured ? [classes(report), confusion(report)] : []),
    ...(report.calibration.images ? [calibration(report)] : []),
    ...(report.unknown ? [unknown(report)] : []),
    ...(report.levels ? [groups(report.levels)] : []),
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

function listOf(className, texts) {
  const list = make("ul", className);
  list.append(...texts.map((text) => make("li", "", text)));
  return list;
}

function summary(report) {
  const head = make("div", "head");
  head.append(make("span", BADGES[report.gate], report.gate), make("bdi", "", report.change));
  const says = SOURCES[report.source]?.(report.images) ?? "";
  const made = section("Verdict", report.measured_anew ? `${says} ${ANEW}` : says, head);
  if (report.reasons.length) made.append(reasons(report));
  if (report.gate === "not judged" && report.verdict !== report.gate) made.append(make("p", "plain", `${report.verdict}.`));
  if (report.notes.length) made.append(listOf("notes", report.notes));
  if (report.proposal) made.append(Object.assign(make("p", "proposal", `${report.proposal}.`), { id: "proposal" }));
  if (report.got_worse + report.got_better) {
    made.append(make("p", "", `Of the images of old classes ${report.got_worse} got worse and ${report.got_better} got better.`));
  }
  if (report.worse.length) {
    const rows = report.worse.map((change) => [change.class, percent(change.before), percent(change.after), String(change.images)]);
    made.append(table("Classes that got worse", ["class that got worse", "before", "now", "images"], rows));
  }
  made.append(tiles(report));
  return made;
}

function reasons(report) {
  const list = listOf("error notes", report.reasons);
  list.setAttribute("aria-label", "Why the gate refused this version");
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
  if (report.forgetting !== null) add("forgetting", points(report.forgetting), "points below the best version, averaged over older tasks");
  add("size", size(newest.total_bytes), newest.delta_bytes ? `new: ${size(newest.delta_bytes)}` : "no new weights");
  add("parameters", million(newest.parameters), `${figure(newest.gflop, 3)} GFLOP an image`);
  const { latency } = report;
  if (latency) add("latency", `${figure(latency.milliseconds, 2)}\u00a0ms`, `an image on one core of the trainer${latency.version === report.version ? "" : `, measured for version ${latency.version}`}`);
  return list;
}

function pictures(report) {
  const made = section("Images", report.pictures.length ? "Some held-out images as the network sees them, the most certain answers first." : "");
  made.append(...pictureLists(report));
  if (report.pictures_note) made.append(make("p", "", report.pictures_note));
  if (report.flipped.length) {
    const rows = report.flipped.map((flip) => [flip.class, flip.before, flip.after, String(flip.count)]);
    made.append(table("Answers that changed", ["class", "answer before", "answer now", "images"], rows, 3));
  }
  return made;
}

function advice({ lines: said, classes: forecasts }) {
  const made = section("What would help most", "", listOf("notes", said.map(({ text }) => text)));
  const rows = forecasts.map(({ class: name, images, accuracy, more, gain }) => [
    name, String(images), accuracy === null ? dash : percent(accuracy), gain === null ? dash : String(more), points(gain),
  ]);
  if (rows.length) made.append(make("p", "", FORECASTS), table("Forecasts", ["class", "images", "right", "more images", "points gained"], rows));
  return made;
}

function tasks(report) {
  const versions = report.growth.map((grown) => `v${grown.version}`);
  const drawn = report.tasks.every((task) => task.accuracy !== null);
  const rows = report.tasks.map((task) => [task.name, String(task.classes), cell(task.learnt), cell(task.now), points(task.forgotten)]);
  const how = report.measured_anew ? "on the same images" : "as it was measured then";
  const made = section("Tasks", `Accuracy of each task in every version since it was learnt, ${how}: later versions have more answers to choose from. Points forgotten are those below the best of these versions.`);
  if (drawn) {
    const series = report.tasks.map((task) => ({ name: task.name, points: task.accuracy.map((value) => (value === null ? null : { value })) }));
    made.append(lines({ title: "Accuracy of each task over the versions", series, labels: versions, below: "version", format: (value) => percent(value, 0), top: 1 }), key(report.tasks.map((task) => task.name)));
  }
  made.append(table("Tasks", ["task", "classes", "when learnt", "now", "points forgotten"], rows));
  return made;
}

function cell(measured) {
  if (!measured) return dash;
  const made = make("span", "", percent(measured.share));
  if (measured.images) made.append(make("small", "", `${(100 * measured.low).toFixed(0)}–${percent(measured.high, 0)} of ${measured.images}`));
  return made;
}

function growth(report) {
  const last = new Map(report.growth.map((grown) => [grown.tasks, grown])); // the newest version with so many tasks
  const shown = [...last.values()];
  const labels = shown.map((grown) => String(grown.tasks));
  const plot = (title, value, format, top) => {
    const made = make("div");
    const series = [{ name: title, points: shown.map((grown) => value(grown)) }];
    made.append(make("h3", "", title), lines({ title: `${title} by number of tasks`, series, labels, below: "tasks", format, top }));
    return made;
  };
  const most = (value) => 1.1 * Math.max(...shown.map(value), 1e-12);
  const plots = make("div", "side");
  if (shown.some((grown) => grown.accuracy)) {
    plots.append(plot("Accuracy", ({ accuracy }) => accuracy && { value: accuracy.share, low: accuracy.low, high: accuracy.high }, (value) => percent(value, 0), 1));
  }
  plots.append(
    plot("Parameters", ({ parameters }) => ({ value: parameters }), (value) => `${figure(value / 1e6, 2)}\u00a0M`, most((grown) => grown.parameters)),
    plot("GFLOP an image", ({ gflop }) => ({ value: gflop }), (value) => figure(value, 2), most((grown) => grown.gflop)),
  );
  const rows = report.growth.toReversed().map((grown) => [
    String(grown.version), grown.change, String(grown.tasks), String(grown.classes), million(grown.parameters), figure(grown.gflop, 3),
    size(grown.total_bytes), size(grown.delta_bytes), size(grown.memory_bytes), cell(grown.accuracy),
  ]);
  const titles = ["version", "what", "tasks", "classes", "parameters", "GFLOP", "size", "new", "images", "accuracy then"];
  return section("Growth", "The lineage of this version. Accuracy was measured when each version was made; the lines through the dots are 95 % intervals.", plots, table("Growth", titles, rows, 2));
}

function classes(report) {
  const rows = report.classes.map((row) => [row.label, row.task, cell(row.right), cell(row.precision)]);
  const made = section("Classes", "Right: the share of a class's images that were answered with the class. Precision: the share of a class's answers that were right. Below each is its 95 % interval.");
  if (report.classes.length < report.all_classes) made.append(make("p", "", `The ${report.classes.length} worst of ${report.all_classes} classes.`));
  if (report.retired.length) made.append(make("p", "", `Retired, and never answered: ${report.retired.join(", ")}.`));
  made.append(table("Classes", ["class", "task", "right", "precision"], rows, 2));
  return made;
}

function confusion(report) {
  const beside = make("div", "side");
  if (report.matrix) beside.append(matrix({ title: "Confusion matrix: rows are classes, columns are answers", counts: report.matrix, names: report.classes.map((row) => row.label) }));
  const rows = report.confused.map((pair) => [pair.label, pair.taken_for, String(pair.images)]);
  if (rows.length) beside.append(table("Classes that were confused", ["is", "taken for", "images"], rows, 2));
  const says = rows.length ? "Rows are the classes of the images, and columns the answers." : "No image was taken for another class, as far as it is recorded.";
  return section("Confusion", says, beside);
}

function calibration(report) {
  const { temperature, before, after, bins, images } = report.calibration;
  const fitted = report.measured_anew ? "with the temperature that was fitted to them" : "each with a temperature that was fitted to the others";
  const says = `How often answers of a confidence are right. On the dashed line the two agree; below it answers are too sure. ${count(images, "image was", "images were")} measured, ${fitted}.`;
  const beside = make("div", "side");
  if (bins.length) beside.append(reliability({ title: "Right answers over confidence", bins }));
  const rows = bins.map((bin) => [`${percent(bin.low, 0)} to ${percent(bin.high, 0)}`, String(bin.right.images), percent(bin.confidence), cell(bin.right)]);
  const tables = make("div");
  if (bins.length) tables.append(table("Calibration by confidence", ["confidence", "images", "mean", "right"], rows));
  else tables.append(make("p", "note", "Older software made this version: it recorded no counts."));
  beside.append(tables);
  const errors = `Expected calibration error ${decimal(after.all)}, and ${decimal(before.all)} without the temperature of ${figure(temperature, 3)}; 0 is perfect.`;
  return section("Calibration", says, make("p", "plain", errors), beside);
}

function unknown(report) {
  const { score, threshold, images, scores } = report.unknown;
  const { refused_known: expected } = report;
  const says = `An image whose score (${score}) is below ${figure(threshold, 3)} is answered as unknown. The threshold was set by ${count(images, "image", "images")} that the score was not fitted to.${expected ? ` About ${percent(expected.share)} of known images fall below it; ${percent(expected.low)} to ${percent(expected.high)} are likely.` : ""}`;
  const made = section("Unknown images", says);
  if (scores) made.append(histogram({ title: "Scores of these images", threshold, ...scores }));
  else made.append(make("p", "note", "Older software made this version: it recorded no scores."));
  const own = Object.entries(report.unknown.by_class ?? {});
  if (own.length) {
    const rows = own.map(([name, one]) => [name, percent(one.above), one.actor, when(one.time), one.reason]);
    made.append(make("p", "", "Images that look most like one of these classes are unknown above its own threshold, a probability of none of the classes."), table("Thresholds of single classes", ["class", "unknown above", "who", "when", "why"], rows));
  }
  return made;
}

function groups(levels) {
  const facts = [
    ["answered by a group", levels.answered_by_groups],
    ["right of these", levels.right_of_these],
    ["right at any level", levels.right_at_any_level],
  ];
  const rows = facts.map(([name, value]) => [name, value === null ? dash : percent(value)]);
  return section("Groups", "Where every class is in doubt and a group of classes is not, the group is the answer.", table("Groups", ["answers", "share"], rows));
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
  const kind = (i) => (i < names ? "name" : "");
  const head = make("tr");
  head.append(...titles.map((title, i) => make("th", kind(i), title)));
  const body = make("tbody");
  const rowOf = (parts) => {
    const row = make("tr");
    row.append(...parts.map((part, i) => {
      const element = make("td", kind(i));
      element.append(part instanceof Node ? part : make("bdi", "", part));
      return element;
    }));
    return row;
  };
  body.append(...rows.slice(0, ROWS).map(rowOf));
  const top = make("thead");
  top.append(head);
  made.append(top, body);
  box.append(made);
  if (rows.length > ROWS) box.append(moreButton(rows, (more) => body.append(...more.map(rowOf))));
  return box;
}

function moreButton(rows, append) {
  const more = make("button", "", `Show all ${rows.length}`);
  more.type = "button";
  more.addEventListener("click", () => {
    append(rows.slice(ROWS));
    more.remove();
  });
  return more;
}
