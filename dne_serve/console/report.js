// Show the report of one version: at /versions/N/report, and in the file that dne-train report
// writes, which has the facts inside. report_parts.js makes the sections.

import { ADMIN_TOKEN, READ_TOKEN, ask, keepToken, token } from "./ask.js";
import { $, make, show, when } from "./elements.js";
import { loadPictures } from "./report_pictures.js";
import { sections } from "./report_parts.js";

const bearer = () => token(READ_TOKEN) || token(ADMIN_TOKEN);
const number = location.pathname.split("/").at(-2);

async function showReport() {
  try {
    const report = await ask("report.json", { bearer: bearer() });
    $("door").hidden = true;
    showFacts(report);
    linkParent(report);
    if (report.proposal) await propose(report);
    await loadPictures(bearer);
    const { offerCorrections } = await import("./correct.js"); // a written report has no server to ask
    await offerCorrections(report.version);
  } catch (error) {
    tellFailure(error);
  }
}

function showFacts(report) {
  tellHeading(report);
  $("report").replaceChildren(...sections(report));
}

function tellHeading(report) {
  document.title = `dne-serve: report on version ${report.version}`;
  $("title").textContent = `Version ${report.version}`;
  const parts = [`Made ${when(report.created)}`, report.parent === null ? "the first version" : `on top of version ${report.parent}`];
  $("state").textContent = parts.join(" · ");
}

function linkParent(report) {
  $("parent").hidden = report.parent === null;
  if (report.parent === null) return;
  $("parent").href = `../${report.parent}/report`;
  $("parent").textContent = `Version ${report.parent}`;
}

/** Say what adapting would win, with a button where the channel names this version. */
async function propose({ version, proposal: says }) {
  const { growth, moves_refused: refused } = await ask(`../../versions?before=${version + 1}&limit=1`, { bearer: bearer() });
  const { proposal } = await import("./moves.js");
  const here = growth?.version === version;
  $("proposal").replaceWith(proposal(says, { version, refused: here ? refused : true, root: "../../" }));
}

function tellFailure(error) {
  $("title").textContent = `Version ${number}`;
  $("state").textContent = error.status === 404 ? "There is no report" : "The report cannot be shown";
  $("door").hidden = !error.refused;
  const place = make("p", "error");
  place.id = "report-error";
  place.setAttribute("role", "alert");
  show(place, error.refused ? "" : error.message);
  $("report").replaceChildren(place);
  if (!error.refused) return;
  show($("door-error"), bearer() ? error.message : "");
  $("door-token").focus();
}

const inside = $("facts");
if (inside) {
  showFacts(JSON.parse(inside.textContent));
} else {
  $("door").addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(READ_TOKEN, $("door-token").value);
    showReport();
  });
  showReport();
}
