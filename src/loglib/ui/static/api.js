// Requests to the server that has served this page, and to nobody else.

let token = "";

/** Take the token from the address, or get it for the ticket that a browser was opened with. */
export async function enter() {
  const asked = new URLSearchParams(location.search);
  token = asked.get("token") || "";
  const ticket = asked.get("ticket");
  if (!token && ticket) {
    const answer = await fetch("/api/enter", { headers: { Authorization: `Ticket ${ticket}` } });
    if (!answer.ok) throw new Failure((await answer.text()).trim(), "token");
    token = (await answer.json()).token;
    history.replaceState(null, "", `/?token=${encodeURIComponent(token)}${location.hash}`);
  }
}

export class Failure extends Error {
  constructor(text, kind) {
    super(text);
    this.kind = kind;
  }
}

/** The facts of this name. Arguments that are null or empty are left out. */
export async function facts(name, args = {}, signal = undefined) {
  const answer = await ask(`/api/${name}`, args, signal);
  return answer.json();
}

/** The bytes of a key or a value. */
export async function bytes(args) {
  const answer = await ask("/api/value", args);
  return answer.blob();
}

async function ask(path, args, signal) {
  const query = new URLSearchParams(Object.entries(args).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  let answer;
  try {
    answer = await fetch(`${path}?${query}`, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("loglib ui does not answer: was it ended?", "gone");
  }
  if (answer.ok) return answer;
  if (answer.headers.get("Content-Type")?.startsWith("application/json")) {
    const { error, kind } = await answer.json();
    throw new Failure(error, kind);
  }
  throw new Failure((await answer.text()).trim(), answer.status === 401 ? "token" : "wrong");
}

/** Places by partition as the server takes them. */
export function places(found) {
  return Object.entries(found).map(([partition, offset]) => `${partition}:${offset}`).join(",");
}
