// Records: pages, a search, the live tail, and one record.

import { bytes, facts, places } from "./api.js";
import { command, h, isolated, put, say, shown } from "./dom.js";
import { plural, sized, whole } from "./format.js";

const LIMIT = 50; // records of a page
const MERGED = 16; // partitions that the server shows together
const LISTED = 500; // records of a tail that stay listed
const TAIL_MS = 1000;
const NAMES = ["partition", "from", "text", "key", "path", "way", "at", "live"];

export async function showRecords(view) {
  const { main, args: [name], query, signal } = view;
  const asked = Object.fromEntries(NAMES.map((each) => [each, query.get(each) ?? ""]));
  const { row } = await facts("topic", { topic: name }, signal);
  const many = row.partitions > MERGED;
  if (many && asked.partition === "" && !asked.live && !asked.key) asked.partition = "0";
  const status = h("p", { class: "quiet", role: "status" }), list = h("section", { class: "records", "aria-label": "Records" });
  const bar = h("nav", { class: "pages", "aria-label": "Pages" });
  put(main, h("h1", {}, "Records of ", isolated(name)), form(name, row, asked, many), status, list, bar);
  if (asked.live) await follow(view, name, asked, { status, list, bar });
  else await page(view, name, asked, { status, list, bar });
}

function address(name, asked) {
  const given = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "" && value !== null));
  return `#/t/${encodeURIComponent(name)}/records${given.size ? `?${given}` : ""}`;
}

function form(name, row, asked, many) {
  const field = (key, label, attributes = {}) => h("label", {}, label, h("input", { name: key, value: asked[key], autocomplete: "off", spellcheck: "false", ...attributes }));
  const submit = (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    const is_end = given.from === "" || given.from === "end";
    const wanted = address(name, { ...given, way: is_end ? "" : "on" });
    if (location.hash === wanted) dispatchEvent(new HashChangeEvent("hashchange")); else location.hash = wanted;
  };
  return h("form", { class: "search", role: "search", onsubmit: submit },
    field("text", "Contains", { type: "search", placeholder: "text in value, key, header" }),
    field("key", "Key", { placeholder: "the whole key" }),
    field("path", "JSON", { placeholder: '.user.name == "ada"', title: 'A condition: .user.name, .status >= 500 and not .items[0].sku == "A-7"' }),
    field("from", "From", { placeholder: "end", list: "starts", title: "begin, end, an offset, a time with its zone (2024-05-01T12:00Z), or an age (-15m)" }),
    h("datalist", { id: "starts" }, ["end", "begin", "-15m", "-1h", "-1d"].map((each) => h("option", { value: each }))),
    h("label", {}, "Partition", h("input", { name: "partition", type: "number", min: 0, max: row.partitions - 1, value: asked.partition, placeholder: many ? "choose" : "all" })),
    h("div", { class: "buttons" }, h("button", {}, "Show"),
      h("a", { id: "live", class: "button", href: address(name, { partition: asked.partition, live: asked.live ? "" : "1" }), "aria-pressed": asked.live ? "true" : "false" }, asked.live ? "Stop live" : "Live")));
}

// --- pages and searches ------------------------------------------------------------------------------------

async function page(view, name, asked, { status, list, bar }) {
  const is_search = Boolean(asked.text || asked.key || asked.path);
  const is_back = asked.way !== "on";
  const found = [], damage = [], notes = [];
  let args = { topic: name, partition: asked.partition, from: asked.from, at: asked.at, way: is_back ? "back" : "", text: asked.text, key: asked.key, path: asked.path, limit: LIMIT };
  let looked = 0, edge = null, part = null, is_stopped = false;
  const stop = h("button", { type: "button", onclick: () => { is_stopped = true; } }, "Stop");
  for (;;) {
    part = await facts("records", { ...args, limit: LIMIT - found.length }, view.signal);
    edge ??= is_back ? part.after : part.before;
    found.splice(is_back ? 0 : found.length, 0, ...part.records);
    damage.splice(is_back ? 0 : damage.length, 0, ...part.damage);
    notes.push(...part.notes);
    looked += part.looked_at;
    put(list, drawn(name, found, damage, notes));
    if (part.ended !== "time" || found.length >= LIMIT || is_stopped) break;
    put(status, `Searching: ${whole(looked)} records looked at, ${sized(part.left_bytes)} of log left, ${whole(found.length)} found. `, stop);
    args = { ...args, from: "", at: places(is_back ? part.before : part.after) };
  }
  const before = is_back ? part.before : edge, after = is_back ? edge : part.after;
  const ended = { full: "", end: is_back ? "This is the beginning of the log. " : "This is the end of the log. ", time: "Stopped. ", bytes: "The page ends early, because its records are large. " }[part.ended];
  put(status, is_search ? `${plural(found.length, "record")} found; ${plural(looked, "record")} looked at. ` : `${plural(found.length, "record")}. `, ended);
  say(status.textContent);
  if (!found.length && !damage.length) put(list, h("p", { class: "quiet" }, is_search ? "Nothing was found here." : "No records are here."));
  const turn = (at, way) => address(name, { ...asked, from: "", at: places(at), way });
  put(bar,
    h("a", { class: "button", href: address(name, { ...asked, from: "begin", at: "", way: "on" }) }, "Oldest"),
    is_back && part.ended === "end" ? h("span", { class: "button off" }, "Older") : h("a", { id: "older", class: "button", href: turn(before, "") }, "Older"),
    h("a", { id: "newer", class: "button", href: turn(after, "on") }, "Newer"),
    h("a", { class: "button", href: address(name, { ...asked, from: "", at: "", way: "" }) }, "Newest"));
}

function drawn(name, records, damage, notes) {
  return [
    notes.map((each) => h("p", { class: "notice" }, each)),
    damage.map((each) => h("p", { class: "notice", role: "alert" }, h("strong", { class: "bad" }, "⚠ damage "), h("bdi", {}, shown(each)))),
    records.length > 0 && h("ol", { class: "rows" }, records.map((each) => line(name, each))),
  ];
}

/** A record in a list. */
function line(name, record) {
  const { key, value } = record;
  return h("li", { "data-row": `${record.partition}:${record.offset}`, tabindex: "-1" },
    h("a", { class: "place", href: addressOf(name, record.partition, record.offset), title: "Show this record" }, `${record.partition}:${record.offset}`),
    h("time", {}, record.time.replace("T", " ").replace("+00:00", "")),
    preview(key, "key"), preview(value, "value"),
    h("span", { class: "quiet more" }, [
      (key.is_cut || value.is_cut || value.kind === "hex") && sized(record.size_bytes), record.headers.length > 0 && plural(record.headers.length, "header"),
    ].filter(Boolean).join(", ")));
}

function preview(content, kind) {
  if (content.kind === "null") return h("span", { class: `${kind} quiet` }, kind === "key" ? "no key" : "null");
  const mark = content.kind === "hex" ? h("span", { class: "kind" }, "hex") : null;
  return h("span", { class: kind }, mark, content.text === "" ? h("span", { class: "quiet" }, "empty") : isolated(content.text), content.is_cut && "…");
}

function addressOf(name, partition, offset) {
  return `#/t/${encodeURIComponent(name)}/record/${partition}/${offset}`;
}

// --- the live tail -----------------------------------------------------------------------------------------

async function follow(view, name, asked, { status, list, bar }) {
  const rows = h("ol", { class: "rows", role: "log", "aria-live": "off" });
  const gone = h("p", { class: "passed" });
  let position = null, shown_count = 0, passed_count = 0, passed_bytes = 0, removed = 0;
  const removed_from = {};
  put(list, rows);
  put(bar);
  status.classList.add("below");
  list.after(status);
  const back = (partition, start, text) => h("a", { href: address(name, { partition, from: start, way: "on" }) }, text);
  await view.every(TAIL_MS, async () => {
    const page = await facts("tail", { topic: name, partition: asked.partition, at: position ? places(position) : "" }, view.signal);
    position = page.position;
    const is_low = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
    for (const each of page.passed) {
      passed_count += each.records ?? 0;
      passed_bytes += each.bytes;
      const what = each.records === null ? `${sized(each.bytes)} of log` : plural(each.records, "record");
      const why = { "too many": "passed over, because they came faster than this page shows them", dropped: "dropped by retention before they were read", damaged: "cannot be read" }[each.why];
      rows.append(h("li", { class: "passed", "data-from": `${each.partition}:${each.start}` }, `${what} of partition ${each.partition} ${why}. `, each.why !== "dropped" && back(each.partition, each.start, "Go back to them")));
    }
    for (const each of page.damage) rows.append(h("li", { class: "passed" }, h("strong", { class: "bad" }, "⚠ damage "), h("bdi", {}, shown(each))));
    rows.append(...page.records.map((each) => line(name, each)));
    shown_count += page.records.length;
    while (rows.children.length > LISTED) {
      const first = rows.firstElementChild;
      const place = first.dataset.row ?? first.dataset.from; // what was passed over there is reached by the link, too
      if (place) {
        const [partition, offset] = place.split(":");
        removed_from[partition] ??= offset;
      }
      if (first.dataset.row) removed += 1;
      first.remove();
    }
    if (removed) {
      const partitions = Object.entries(removed_from);
      put(gone, `${plural(removed, "earlier record")} of this tail are not listed any more. `,
        partitions.length <= MERGED && h("a", { href: address(name, { partition: partitions.length === 1 ? partitions[0][0] : "", at: places(removed_from), way: "on" }) }, "Go back to them"));
      if (!gone.isConnected) list.prepend(gone);
    }
    put(status, h("span", { class: "live" }, "● live "), `${plural(shown_count, "record")} shown`, passed_bytes > 0 && `, ${passed_count ? plural(passed_count, "record") : ""} passed over (${sized(passed_bytes)} of log)`, ". New records come at the end.");
    if (is_low && page.records.length) scrollTo(0, document.documentElement.scrollHeight);
  });
}

// --- one record --------------------------------------------------------------------------------------------

export async function showRecord(view) {
  const { main, args: [name, partition, offset], signal } = view;
  const record = await facts("record", { topic: name, partition, offset }, signal);
  const { row } = await facts("topic", { topic: name }, signal);
  const older = await facts("records", { topic: name, partition, at: `${partition}:${offset}`, way: "back", limit: 1 }, signal).catch(() => ({ records: [] }));
  const before = older.records[0];
  const around = address(name, { partition, from: offset, way: "on" });
  put(main,
    h("p", { class: "pages" },
      before ? h("a", { id: "older", class: "button", href: addressOf(name, partition, before.offset) }, "Older") : h("span", { class: "button off" }, "Older"),
      h("a", { id: "newer", class: "button", href: addressOf(name, partition, record.next_offset) }, "Newer"),
      h("a", { id: "up", class: "button", href: around }, "List from here")),
    h("h1", {}, `Record ${partition}:${offset}`),
    h("dl", { class: "pairs" },
      h("dt", {}, "Topic"), h("dd", {}, isolated(name)), h("dt", {}, "Partition"), h("dd", {}, partition), h("dt", {}, "Offset"), h("dd", {}, offset),
      h("dt", {}, "Time"), h("dd", {}, `${record.time} `, h("span", { class: "quiet" }, `${record.timestamp_us} us`)),
      h("dt", {}, "Size"), h("dd", {}, `${sized(record.size_bytes)} of key, value and headers`), h("dt", {}, "Next offset"), h("dd", {}, record.next_offset)),
    part(name, record, "Key", record.key, "key"), part(name, record, "Value", record.value, "value"),
    record.headers.length > 0 && [h("h2", {}, "Headers"), h("dl", { class: "pairs" }, record.headers.flatMap(([title, content]) => [h("dt", {}, isolated(title)), h("dd", {}, preview(content, "value"))]))],
    h("p", {}, "In a shell: ", command(`loglib cat ${quoted(row.path)} -p ${partition} --from ${partition}:${offset} -n 1`)));
}

function part(name, record, title, content, kind) {
  if (content.kind === "null") return [h("h2", {}, title), h("p", { class: "quiet" }, kind === "key" ? "The record has no key." : "The value is null.")];
  const what = { json: "JSON, indented", text: "text", hex: "bytes, in hexadecimal digits" }[content.kind];
  return [
    h("h2", {}, title, " ", h("span", { class: "quiet" }, `${what}, ${sized(content.size_bytes)}`)),
    content.is_cut && h("p", { class: "notice" }, `Only the beginning is shown. The whole has ${sized(content.size_bytes)}.`),
    h("pre", { class: "content", dir: content.kind === "text" ? "auto" : "ltr", tabindex: "0", "aria-label": title }, h("bdi", {}, shown(content.text))),
    h("p", {}, h("button", { type: "button", onclick: () => download(name, record, kind) }, `Download the ${kind}`)),
  ];
}

async function download(name, record, kind) {
  const blob = await bytes({ topic: name, partition: record.partition, offset: record.offset, part: kind });
  const link = h("a", { href: URL.createObjectURL(blob), download: `${name}-${record.partition}-${record.offset}.${kind}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** A path, quoted for a shell. */
function quoted(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\"'\"'")}'`;
}

