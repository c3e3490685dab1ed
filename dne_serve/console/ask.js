// Requests to this server. Tokens for reading, labelling and moving the channel may be three: one that
// is refused takes nothing away from the others. A token that is given first is tried for all of them.

export const READ_TOKEN = "dne-token";
export const LABEL_TOKEN = "dne-label-token";
export const ADMIN_TOKEN = "dne-admin-token";

const TOKENS = [READ_TOKEN, LABEL_TOKEN, ADMIN_TOKEN];

// The link that dne-serve prints brings a token behind the #, which no browser sends to anybody.
const brought = new URLSearchParams(location.hash.slice(1)).get("token");
if (brought) {
  for (const one of TOKENS) sessionStorage.setItem(one, brought);
  history.replaceState(null, "", location.pathname + location.search);
}

export const token = (name) => sessionStorage.getItem(name) ?? "";
export const keepToken = (name, value) => {
  const before = token(name); // what was tried for all of them
  for (const one of TOKENS) if (one === name || !token(one) || token(one) === before) sessionStorage.setItem(one, value);
};
export const forgetToken = (name) => sessionStorage.removeItem(name);

/** Give the JSON of an answer (`as: "blob"`: its bytes, "answer": itself), or throw an Error with the problem's own
 * sentence. */
export async function ask(path, { bearer = token(READ_TOKEN), as = "json", ...options } = {}) {
  const headers = { ...(bearer ? { Authorization: `Bearer ${bearer}` } : {}), ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    document.dispatchEvent(new Event("unreachable"));
    throw Object.assign(new Error("The server cannot be reached."), { unreachable: true });
  }
  document.dispatchEvent(new Event("reached"));
  if (as === "blob" && answer.ok) return answer.blob();
  if (as === "answer" && answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw refusal(answer, body);
  return body;
}

function refusal(answer, body) {
  const error = new Error(body.detail || `The server answered ${answer.status}.`);
  error.status = answer.status;
  error.type = body.type;
  error.refused = answer.status === 401 || answer.status === 403;
  error.retryAfter = Number(answer.headers.get("Retry-After")) || 1;
  return error;
}
