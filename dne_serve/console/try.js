// Trying an operation from its documentation, and the same as a command for a shell.

import { READ_TOKEN, token } from "./ask.js";
import { make, seconds } from "./elements.js";

const LONGEST = 100_000; // characters of an answer that are shown
const FORM = "multipart/form-data";
const JSON_TYPE = "application/json";

/** Reading is tried from here, and forms with files; moving a channel is left to a command. */
export const canTry = (operation) => operation.method === "get" || Boolean(operation.requestBody?.content[FORM]);

/** Make the address of an operation from what was typed; `{name}` stays where nothing was. */
function addressOf(operation, values) {
  const typed = (one) => values.get(one.name) ?? "";
  const parameters = operation.parameters ?? [];
  let path = operation.path.slice(1);
  for (const one of parameters.filter((one) => one.in === "path" && typed(one))) {
    path = path.replace(`{${one.name}}`, encodeURIComponent(typed(one)));
  }
  const given = parameters.filter((one) => one.in === "query" && typed(one));
  const query = new URLSearchParams(given.map((one) => [one.name, typed(one)]));
  return given.length ? `${path}?${query}` : path;
}

/** Quote an argument for a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Write an operation as a curl command. The token stays in the shell's environment. */
export function commandOf(operation, values) {
  const parts = ["curl"];
  if (operation.security) parts.push('-H "Authorization: Bearer $DNE_TOKEN"');
  const content = operation.requestBody?.content ?? {};
  if (content[FORM]) parts.push(...fileFields(content[FORM].schema).map((name) => `-F ${name}=@photo.jpg`));
  else if (content[JSON_TYPE]) parts.push("--json", operation.requestBody.required ? "@body.json" : "'{}'");
  else if (operation.method !== "get") parts.push("-X", operation.method.toUpperCase());
  const base = location.href.split("#")[0].replace(/docs$/, "");
  return [...parts, quoted(base + addressOf(operation, values))].join(" ");
}

const fileFields = (schema) => Object.keys(schema.properties ?? {});

/** Make a form that sends the operation and shows the answer. */
export function trier(operation, values) {
  const form = make("form", "try");
  const files = fileFields(operation.requestBody?.content[FORM]?.schema ?? {}).map((name) => fileInput(name, operation));
  const button = make("button", "primary", "Send");
  const told = make("p", "note");
  told.setAttribute("role", "status");
  const shown = make("pre", "shown");
  shown.hidden = true;
  shown.tabIndex = 0;
  form.append(...files.map((one) => one.label), button, told, shown);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    await send(operation, values, { files, told, shown });
    button.disabled = false;
  });
  return form;
}

function fileInput(name, operation) {
  const label = make("label", "", `${name} `);
  const input = make("input");
  input.type = "file";
  input.multiple = true;
  input.required = true;
  input.id = `${operation.operationId}-${name}-file`;
  label.append(input);
  return { name, input, label };
}

async function send(operation, values, { files, told, shown }) {
  const missing = (operation.parameters ?? []).find((one) => one.required && !values.get(one.name));
  if (missing) {
    told.textContent = `Give ${missing.name} first.`;
    return;
  }
  const began = performance.now();
  told.textContent = "Asking…";
  try {
    const answer = await fetch(addressOf(operation, values), request(operation, files));
    const text = readable(await answer.text());
    told.textContent = `${answer.status} ${answer.statusText} · ${seconds(performance.now() - began)}`;
    shown.textContent = text.length > LONGEST ? `${text.slice(0, LONGEST)} …` : text;
    shown.hidden = false;
  } catch {
    told.textContent = "The server cannot be reached.";
  }
}

function request(operation, files) {
  const headers = token(READ_TOKEN) ? { Authorization: `Bearer ${token(READ_TOKEN)}` } : {};
  const options = { method: operation.method.toUpperCase(), headers };
  if (!files.length) return options;
  const body = new FormData();
  for (const { name, input } of files) for (const file of input.files) body.append(name, file, file.name);
  return { ...options, body };
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
