// The page: which view is shown for an address, what is above it, and the keys.

import { enter, facts, Failure } from "./api.js";
import { h, put, say } from "./dom.js";
import { showGroups } from "./groups.js";
import { showRecord, showRecords } from "./records.js";
import { showSegments, showTopic } from "./topic.js";
import { showTopics } from "./topics.js";

const TABS = [["", "Overview"], ["records", "Records"], ["groups", "Groups", ", shares"], ["segments/0", "Segments"]];
const KEYS = [
  ["?", "show these keys"], ["t", "all topics"], ["1 2 3 4", "overview, records, groups and shares, segments of the topic"],
  ["j k", "next, previous row"], ["Enter", "open the row"], ["/", "go to the first field"],
  ["[ ]", "older, newer records"], ["l", "live tail"], ["Esc", "leave a field; up from a record"],
];

let leaving = new AbortController();
let only = null;

/** What a view gets: where it draws, the arguments, and the signal that it is left. */
function context(main, args, query) {
  const signal = leaving.signal;
  return {
    main, args, query, signal,
    /** Call now, and again and again while the view is shown and can be seen. Errors are shown above it. */
    every(ms, work) {
      let timer;
      const turn = async () => {
        if (!document.hidden) {
          try {
            await work();
            notice(null);
          } catch (error) {
            if (signal.aborted) return;
            if (!(error instanceof Failure)) console.error(error);
            notice(error);
          }
        }
        if (!signal.aborted) timer = setTimeout(turn, ms);
      };
      const seen = () => { if (!document.hidden) { clearTimeout(timer); turn(); } };
      document.addEventListener("visibilitychange", seen, { signal });
      signal.addEventListener("abort", () => clearTimeout(timer));
      return turn();
    },
  };
}

/** An error above the view, or none. */
function notice(error) {
  const found = document.getElementById("notice");
  if (!error) { found?.remove(); return; }
  const text = h("p", { id: "notice", class: "notice", role: "alert" }, error.message);
  if (found) found.replaceWith(text); else document.getElementById("content").prepend(text);
}

async function route() {
  leaving.abort();
  leaving = new AbortController();
  const signal = leaving.signal;
  const main = document.getElementById("content");
  const [path, asked = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decodeURIComponent);
  const query = new URLSearchParams(asked);
  if (!path && only) parts.splice(0, 1, "t", only);
  const [kind, name, view = "", ...rest] = parts;
  where(kind === "t" ? name : null, view, rest);
  put(main, h("p", { class: "quiet" }, "Loading…"));
  const views = { "": showTopic, records: showRecords, record: showRecord, groups: showGroups, segments: showSegments };
  const show = kind === "t" && name ? views[view] : showTopics;
  try {
    if (!show) throw new Failure("there is no such page", "wrong");
    await show(context(main, [name, ...rest], query));
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof Failure)) console.error(error);
    put(main, h("p", { class: "notice", role: "alert" }, error.message), h("p", {}, h("a", { href: "#/" }, "All topics")));
  }
}

/** The way to what is shown, and the tabs of a topic. */
function where(name, view, rest) {
  const nav = document.getElementById("where");
  document.title = name ? `${name} · loglib` : "loglib";
  put(nav, h("a", { href: "#/", class: "home", "aria-current": name || only ? null : "page" }, only ? "loglib" : "Topics"));
  if (!name) return;
  const base = `#/t/${encodeURIComponent(name)}`;
  nav.append(h("bdi", { class: "name" }, name), h("span", { class: "tabs" }, TABS.map(([path, text, more], at) => {
    const is_here = path.split("/")[0] === (view === "record" ? "records" : view);
    return h("a", { href: path ? `${base}/${path}` : base, "aria-current": is_here ? "page" : null, title: `Key ${at + 1}` }, text, more && h("span", { class: "wide" }, more));
  })));
}

/** Go to an address. */
export function go(address) {
  location.hash = address;
}

// --- keys ---------------------------------------------------------------------------------------------------

function rows() {
  return [...document.querySelectorAll("#content [data-row]")].filter((each) => each.offsetParent !== null);
}

function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.indexOf(document.activeElement.closest("[data-row]"));
  const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const is_field = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    if (is_field) event.target.blur();
    else if (!document.getElementById("help").open) document.getElementById("up")?.click();
    return;
  }
  if (is_field) return;
  const tab = document.querySelectorAll("#where .tabs a")["1234".indexOf(event.key)];
  const actions = {
    "?": () => document.getElementById("help").showModal(), t: () => go("#/"), j: () => move(1), k: () => move(-1),
    "/": () => document.querySelector("#content input, #content select")?.focus(), "[": () => document.getElementById("older")?.click(),
    "]": () => document.getElementById("newer")?.click(), l: () => document.getElementById("live")?.click(),
    Enter: () => { const row = event.target.closest("[data-row]"); if (row && event.target === row) row.querySelector("a")?.click(); },
  };
  const action = tab ? () => tab.click() : actions[event.key];
  if (!action) return;
  if (event.key !== "Enter") event.preventDefault();
  action();
}

async function begin() {
  put(document.getElementById("help-keys"), KEYS.map(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)]));
  document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("content").focus(); });
  document.addEventListener("keydown", press);
  try {
    await enter();
    only = (await facts("topics")).only;
  } catch (error) {
    put(document.getElementById("content"), h("p", { class: "notice", role: "alert" }, error.message));
    return;
  }
  addEventListener("hashchange", route);
  await route();
  say("loaded");
}

begin();
