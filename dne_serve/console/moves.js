// Moving the channel, and asking for a job: promote, roll back, resume, learn, adapt. Each is asked for
// in a dialog, which stands here for all pages.

import { ADMIN_TOKEN, ask, forgetToken, keepToken, token } from "./ask.js";
import { $, make, show } from "./elements.js";

let move = null;

function part(tag, id, { text = "", className = "", ...properties } = {}, ...inside) {
  const element = Object.assign(make(tag, className, text), { id, ...properties });
  element.append(...inside);
  return element;
}

function dialog() {
  const form = part("form", "move-form", { method: "dialog" },
    part("h2", "move-title"),
    part("div", "refusal", { className: "error", hidden: true }, make("p", "", "The gate refused this version:"), part("ul", "refusal-reasons")),
    part("label", "reason-label", { htmlFor: "reason" }),
    part("input", "reason", { type: "text", maxLength: 500, autocomplete: "off" }),
    part("div", "token-box", {},
      part("label", "token-label", { htmlFor: "token", text: "Admin token" }),
      part("input", "token", { type: "password", autocomplete: "off", required: true }),
      make("p", "note", "It is kept until this tab is closed. Where dne-serve prints a link, the link brings it.")),
    part("p", "move-error", { className: "error", hidden: true }),
    part("div", "move-buttons", { className: "buttons" },
      part("button", "move-cancel", { type: "button", text: "Cancel" }),
      part("button", "move-go", { type: "submit", className: "primary" })));
  form.querySelector("#move-error").setAttribute("role", "alert");
  const element = part("dialog", "move", {}, form);
  element.setAttribute("aria-labelledby", "move-title");
  return element;
}

document.body.append(dialog());

/** Make the proposal to adapt the version that the channel names, with the button that asks a worker
 * for it, unless nobody can ask from here. `root` leads to the console. */
export function proposal(says, { version, refused = null, root = "" }) {
  const element = make("p", "proposal", `${says}. `);
  if (refused) return element;
  const button = make("button", "", "Adapt…");
  button.type = "button";
  button.id = "adapt";
  const title = `Adapt version ${version}`;
  button.setAttribute("aria-label", title);
  button.addEventListener("click", () => openMove({ path: `${root}jobs`, kind: "grow", title, verb: "Adapt" }));
  const follow = make("a", "", "Watch it");
  follow.href = `${root}label`;
  element.append(button, " ", follow);
  return element;
}

/** Make the button that moves the channel to a version. */
export function moveButton(one, overview) {
  // Older than what is served: a way back. Newer: a way on.
  const back = overview.served !== null && one.version < overview.served;
  const refused = one.gate === "refused";
  const verb = back ? "Roll back" : "Promote";
  const title = `${back ? "Roll back to" : "Promote"} version ${one.version}${refused ? " although refused" : ""}`;
  const button = make("button", refused ? "danger" : "", refused ? `${verb}…` : verb);
  button.type = "button";
  button.id = `move-to-${one.version}`;
  button.setAttribute("aria-label", title);
  button.addEventListener("click", () => {
    openMove({ path: back ? "rollback" : "promote", to: one.version, title, verb, refused, reasons: one.reasons });
  });
  return button;
}

/** Open the dialog that asks for a reason, and for the token if none is known. */
export function openMove({ title, verb, refused = false, reasons = [], ...wanted }) {
  move = wanted;
  $("move-title").textContent = title;
  $("move-go").textContent = refused ? `${verb} although refused` : verb;
  $("move-go").className = refused ? "danger primary" : "primary";
  $("refusal").hidden = !refused;
  $("refusal-reasons").replaceChildren(...reasons.map((one) => make("li", "", one)));
  $("reason").required = refused;
  $("reason-label").textContent = refused
    ? "Why move to it all the same? (kept in the channel's history)"
    : "Reason (kept in the channel's history)";
  $("token").value = token(ADMIN_TOKEN);
  $("token-box").hidden = Boolean($("token").value);
  $("reason").value = "";
  show($("move-error"), "");
  $("move").showModal();
}

async function goOn() {
  const body = { reason: $("reason").value.trim() };
  if (move.to !== undefined) body.to = move.to;
  for (const name of ["kind", "pretrained"]) if (move[name] !== undefined) body[name] = move[name];
  $("move-go").disabled = true;
  try {
    await ask(move.path, {
      method: "POST",
      bearer: $("token").value,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    keepToken(ADMIN_TOKEN, $("token").value);
    $("move").close();
  } catch (error) {
    if (error.refused) {
      forgetToken(ADMIN_TOKEN);
      $("token-box").hidden = false;
    } else if (error.status !== 429) {
      keepToken(ADMIN_TOKEN, $("token").value); // the move failed, not the token
    }
    show($("move-error"), error.message);
  } finally {
    $("move-go").disabled = false;
  }
  document.dispatchEvent(new Event("moved"));
}

$("reason").addEventListener("input", () => {
  const blank = $("reason").required && !$("reason").value.trim();
  $("reason").setCustomValidity(blank ? "Say why." : "");
});
$("resume")?.addEventListener("click", () => openMove({ path: "resume", title: "Resume following", verb: "Resume" }));
$("move-cancel").addEventListener("click", () => $("move").close());
$("move-form").addEventListener("submit", (event) => {
  event.preventDefault();
  goOn();
});
