// A schema of the OpenAPI document as a tree that opens level by level: a schema may hold itself.

import { make, prose } from "./elements.js";

const PREFIX = "#/components/schemas/";
const LIMITS = {
  minimum: "at least", maximum: "at most", minLength: "characters, at least", maxLength: "characters, at most",
  minItems: "items, at least", maxItems: "items, at most", pattern: "pattern", default: "default", format: "format",
};

const nameOf = (schema) => (schema.$ref ?? schema.allOf?.[0]?.$ref ?? "").replace(PREFIX, "");

/** Say in a few words what a value of the schema is. */
export function kindOf(schema) {
  const name = nameOf(schema);
  const choices = schema.anyOf ?? schema.oneOf;
  let kind = name || schema.type || "anything";
  if (choices) kind = choices.map(kindOf).join(" or ");
  else if (schema.enum) kind = schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  else if (schema.type === "array") kind = `list of ${kindOf(schema.items ?? {})}`;
  else if (schema.type === "object" && isMap(schema)) kind = `object of ${kindOf(schema.additionalProperties)}`;
  return schema.nullable ? `${kind} or null` : kind;
}

const isMap = (schema) => typeof schema.additionalProperties === "object";

/** Find the schema whose properties are worth showing: itself, or what it lists or refers to. */
function inner(schema, schemas) {
  if (!schema) return null;
  const name = nameOf(schema);
  if (name) return schemas[name] ?? null;
  if (schema.properties) return schema;
  if (schema.type === "array") return inner(schema.items, schemas);
  if (isMap(schema)) return inner(schema.additionalProperties, schemas);
  for (const one of schema.anyOf ?? schema.oneOf ?? []) {
    const found = inner(one, schemas);
    if (found) return found;
  }
  return null;
}

/** Show a schema under a name; its properties appear when it is opened. */
export function schemaTree(name, schema, { schemas, required = false, open = false }) {
  const title = make("span", "property");
  title.append(make("code", "", name), " ", make("span", "kind", kindOf(schema)));
  if (required) title.append(" ", make("span", "must", "required"));
  const notes = describe(schema);
  const within = inner(schema, schemas);
  if (!within?.properties) {
    const leaf = make("div", "leaf");
    leaf.append(title, ...notes);
    return leaf;
  }
  const tree = make("details", "tree");
  const summary = make("summary");
  summary.append(title);
  tree.append(summary, ...notes);
  tree.addEventListener("toggle", () => tree.append(...properties(within, schemas)), { once: true });
  tree.open = open;
  return tree;
}

function properties(schema, schemas) {
  const list = make("div", "properties");
  if (schema.description) list.append(prose("p", "note", schema.description));
  for (const [name, one] of Object.entries(schema.properties)) {
    list.append(schemaTree(name, one, { schemas, required: schema.required?.includes(name) }));
  }
  return [list];
}

function describe(schema) {
  const limits = Object.entries(LIMITS)
    .filter(([key]) => schema[key] !== undefined)
    .map(([key, words]) => `${words} ${JSON.stringify(schema[key])}`);
  const said = [schema.description, limits.join(", ")].filter(Boolean);
  return said.map((text) => prose("p", "note", text));
}
