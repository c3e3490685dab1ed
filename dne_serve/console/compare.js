// Two versions side by side: the same images, the differences marked, and how often both agree.

import { $, count, make, percent, show } from "./elements.js";

let tally = null; // of the run under way: images that both have answered, and how many differ

/** Begin a run: nothing has been compared. */
export function beginComparing() {
  tally = { images: 0, differ: 0, first: null, second: null, why: "" };
  tellTally();
}

/** Ask for the same images by the other version. Null: none was chosen, or it cannot answer. */
export async function otherAnswer(first, ask) {
  const version = $("beside").value;
  if (!version || tally.why) return null;
  if (String(first.version) === version) {
    tally.why = `both are version ${version}: choose another one`;
    tellTally();
    return null;
  }
  try {
    return await ask(version);
  } catch (error) {
    tally.why = error.message; // the answers of the first version stand
    tellTally();
    return null;
  }
}

/** Put the other version's answer beside the first one's, and mark where they differ. */
export function addOther(row, box, { first, second, versions }) {
  const differs = isDifferent(first, second);
  row.classList.add("compared", differs ? "differs" : "same");
  const mark = make("p", differs ? "badge overruled" : "badge", differs ? "differs" : "same");
  box.prepend(mark);
  row.append(box);
  tally.images += 1;
  tally.differ += differs;
  [tally.first, tally.second] = versions;
  tellTally();
}

/** Two answers differ as a person sees them: in the class, or in whether there is one. */
function isDifferent(first, second) {
  if (first.unknown || second.unknown) return first.unknown !== second.unknown;
  return first.label !== second.label;
}

function tellTally() {
  const { images, differ, first, second, why } = tally;
  const same = images - differ;
  const agreed = images ? `Versions ${first} and ${second} agree on ${same} of ${count(images, "image", "images")} (${percent(same / images)}).` : "";
  const missing = why ? `Version ${$("beside").value} was not asked: ${why}` : "";
  show($("beside-told"), [agreed, missing].filter(Boolean).join(" "));
  $("beside-only").hidden = !differ && !$("only-different").checked;
}

/** Offer the versions that can be asked, as the other list does. */
function offer() {
  const chosen = $("beside").value;
  const options = [...$("ask").options].filter((option) => option.value);
  $("beside").replaceChildren(new Option("no other version", ""), ...options.map((one) => new Option(one.text, one.value)));
  $("beside").value = options.some((one) => one.value === chosen) ? chosen : "";
}

new MutationObserver(offer).observe($("ask"), { childList: true });
$("only-different").addEventListener("change", (event) => $("answers").classList.toggle("only-different", event.target.checked));
offer();
