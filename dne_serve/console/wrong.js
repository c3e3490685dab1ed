// Under an answer: name the true class of a picture, which puts it into the inbox to be learnt.

import { LABEL_TOKEN, READ_TOKEN, ask, token } from "./ask.js";
import { make, show } from "./elements.js";

const bearer = () => token(LABEL_TOKEN) || token(READ_TOKEN);
const names = make("datalist");
names.id = "class-names";
document.body.append(names);
let mayLabel = null; // a promise

/** Tell whether this page may label; ask the server once. */
function permitted() {
  mayLabel ??= ask("inbox?limit=1", { bearer: bearer() }).then(() => true, (error) => !error.refused);
  return mayLabel;
}

async function offerNames() {
  const { classes } = await ask("classes").catch(() => ({ classes: [] }));
  names.replaceChildren(...classes.map(({ label }) => Object.assign(make("option"), { value: label })));
}

/** Make the box of a picture. It stays hidden where this page may not label. */
export function wrongBox(file) {
  const box = make("details", "wrong");
  box.hidden = true;
  permitted().then((may) => (box.hidden = !may));
  const summary = make("summary", "", "Wrong? Label it");
  summary.append(make("span", "visually-hidden", ` ${file.name}`));
  const form = make("form");
  const label = make("label", "", "Its class ");
  const input = Object.assign(make("input"), { type: "text", required: true, maxLength: 200, autocomplete: "off" });
  input.setAttribute("list", names.id);
  label.append(input);
  const button = Object.assign(make("button", "", "Save"), { type: "submit" });
  const said = make("p", "note");
  said.setAttribute("role", "status");
  form.append(label, button);
  box.append(summary, form, said);
  box.addEventListener("toggle", () => {
    if (box.open) offerNames();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      show(said, await teach(file, input.value.trim()));
    } catch (error) {
      show(said, error.message);
    }
    button.disabled = false;
  });
  return box;
}

async function teach(file, label) {
  const body = new FormData();
  body.append("files", file, file.name);
  const { pictures } = await ask(`inbox?${new URLSearchParams({ label })}`, { method: "POST", body, bearer: bearer() });
  const [{ item, why }] = pictures;
  if (item === null) throw new Error(why);
  return `It waits in the inbox as ${label}. “Label images” above has the button that learns it.`;
}

document.addEventListener("token", () => (mayLabel = null));
