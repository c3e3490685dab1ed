// The documentation at /docs: every operation of openapi.json, with a command and a way to try it.

import { READ_TOKEN, keepToken, forgetToken, token } from "./ask.js";
import { $, make, prose, show } from "./elements.js";
import { kindOf, schemaTree } from "./schema.js";
import { canTry, commandOf, trier } from "./try.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

function render(found) {
  $("title").textContent = `${found.info.title} ${found.info.version}`;
  $("about").textContent = found.info.description ?? "";
  const schemas = found.components?.schemas ?? {};
  for (const [tag, operations] of byTag(found)) $("operations").append(tagSection(tag, operations, schemas));
  $("schemas").append(...Object.entries(schemas).map(([name, schema]) => schemaTree(name, schema, { schemas })));
  $("schemas").hidden = false;
}

function byTag(found) {
  const tags = new Map();
  for (const [path, item] of Object.entries(found.paths)) {
    for (const method of METHODS.filter((one) => item[one])) {
      const operation = { ...item[method], method, path };
      const tag = operation.tags?.[0] ?? "other";
      tags.set(tag, [...(tags.get(tag) ?? []), operation]);
    }
  }
  return tags;
}

function tagSection(tag, operations, schemas) {
  const section = make("section");
  section.append(make("h2", "", tag), ...operations.map((one) => operationBox(one, schemas)));
  return section;
}

/** Show an operation as one line; the rest is made when it is opened. */
function operationBox(operation, schemas) {
  const box = make("details", "operation");
  box.id = operation.operationId;
  box.dataset.words = `${operation.method} ${operation.path} ${operation.summary} ${operation.description ?? ""}`.toLowerCase();
  const line = make("summary");
  line.append(make("span", `method ${operation.method}`, operation.method.toUpperCase()), make("code", "path", operation.path), prose("span", "short", operation.description ?? operation.summary));
  box.append(line);
  box.addEventListener("toggle", () => box.append(operationBody(operation, schemas)), { once: true });
  return box;
}

function operationBody(operation, schemas) {
  const body = make("div", "body");
  body.append(make("p", "note", whoMay(operation.security)));
  const values = new Map();
  const changed = () => {
    command.textContent = commandOf(operation, values);
  };
  const parameters = operation.parameters ?? [];
  if (parameters.length) body.append(make("h3", "", "Parameters"), ...parameters.map((one) => parameterRow(one, operation, values, changed)));
  if (operation.requestBody) body.append(...requestBody(operation.requestBody, schemas));
  const command = make("pre", "command");
  changed();
  body.append(make("h3", "", "As a command"), command);
  if (canTry(operation)) body.append(make("h3", "", "Try it"), trier(operation, values));
  body.append(make("h3", "", "Answers"), ...Object.entries(operation.responses).map(([status, one]) => answerBox(status, one, schemas)));
  return body;
}

function whoMay(security) {
  if (!security) return "Open to everybody.";
  const optional = security.some((one) => Object.keys(one).length === 0);
  return optional ? "Open until a token with its scope exists; then that token is needed." : "Needs a token with the scope admin.";
}

function parameterRow(parameter, operation, values, changed) {
  const row = make("div", "parameter");
  const id = `${operation.operationId}-${parameter.name}`;
  const label = make("label", "property");
  label.htmlFor = id;
  label.append(make("code", "", parameter.name), " ", make("span", "kind", `${kindOf(parameter.schema)}, in the ${parameter.in}`));
  if (parameter.required) label.append(" ", make("span", "must", "required"));
  const input = make("input");
  input.id = id;
  input.type = "text";
  input.autocomplete = "off";
  if (parameter.schema.default !== undefined) input.placeholder = String(parameter.schema.default);
  input.addEventListener("input", () => {
    values.set(parameter.name, input.value);
    changed();
  });
  row.append(label, input);
  if (parameter.description) row.append(prose("p", "note", parameter.description));
  return row;
}

function requestBody(body, schemas) {
  const kinds = Object.entries(body.content).map(([type, one]) => schemaTree(type, one.schema ?? {}, { schemas, open: false }));
  return [make("h3", "", body.required ? "Body" : "Body (may be left out)"), ...kinds];
}

function answerBox(status, answer, schemas) {
  const box = make("div", "answered");
  const line = make("p");
  line.append(make("code", status < "400" ? "status good" : "status", status), " ", answer.description);
  box.append(line, ...Object.entries(answer.content ?? {}).map(([type, one]) => schemaTree(type, one.schema ?? {}, { schemas })));
  return box;
}

function filter() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const box of document.querySelectorAll(".operation")) {
    box.hidden = !words.every((word) => box.dataset.words.includes(word));
  }
  for (const section of $("operations").children) {
    section.hidden = !section.querySelector(".operation:not([hidden])");
  }
}

function openNamed() {
  const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!box?.classList.contains("operation")) return;
  box.open = true;
  box.scrollIntoView();
}

async function start() {
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`openapi.json was answered with ${answer.status}`);
    render(await answer.json());
    openNamed();
  } catch (error) {
    show($("failed"), `The document cannot be shown: ${error.message}.`);
  }
}

$("tools").addEventListener("submit", (event) => event.preventDefault());
$("find").addEventListener("input", filter);
$("token").value = token(READ_TOKEN);
$("token").addEventListener("input", () => ($("token").value ? keepToken(READ_TOKEN, $("token").value) : forgetToken(READ_TOKEN)));
addEventListener("hashchange", openNamed);
start();
