// The topics of a directory: a row for each, and what is wrong.

import { facts } from "./api.js";
import { command, h, isBusy, isolated, put, redraw, shown, table } from "./dom.js";
import { age, plural, rate, sized, whole } from "./format.js";
import { sumsInACell } from "./shares.js";

const PAGE = 50; // rows that are looked at together
const AT_ONCE = 4; // requests
const EVERY_MS = 4000;
const NAMES = ["Topic", ">Records", ">Size", ">Records/s", ">Bytes/s", ">Partitions", ">Oldest", "Groups' lag", "Shares", "State"];

export async function showTopics(view) {
  const { main, query, signal } = view;
  const rows = new Map();
  let found = await facts("topics", {}, signal);
  let from = 0;
  const field = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name", value: query.get("name") || "", oninput: () => { from = 0; draw(); refresh(); } });
  const wrong = h("section", { "aria-label": "What is wrong" }), list = h("section", {}), pages = h("nav", { class: "pages", "aria-label": "Pages" });
  put(main, h("h1", {}, isolated(found.title)), h("p", { class: "quiet path" }, isolated(found.root)), wrong, found.names.length > 8 && h("p", {}, field), list, pages);

  const chosen = () => found.names.filter((name) => name.toLowerCase().includes(field.value.toLowerCase()));

  function draw() {
    const names = chosen(), part = names.slice(from, from + PAGE);
    if (!isBusy(wrong)) drawWrong(wrong, part.map((name) => rows.get(name)).filter(Boolean));
    if (!found.names.length) {
      put(list, h("p", {}, "No topic is here yet. This makes one: "), command(`loglib create ${found.root}/NAME`));
      return;
    }
    const has_shares = part.some((name) => rows.get(name)?.shares.length);
    const columns = NAMES.filter((each) => has_shares || each !== "Shares");
    redraw(list, table("Topics", columns, part.map((name) => ({ attributes: { "data-row": name, tabindex: "-1" }, cells: cells(name, rows.get(name), columns) })), { class: "list" }));
    const more = names.length > PAGE;
    put(pages, more && h("button", { type: "button", disabled: from === 0, onclick: () => turn(-PAGE) }, "Previous"),
      more && ` ${from + 1} to ${Math.min(names.length, from + PAGE)} of ${plural(names.length, "topic")} `,
      more && h("button", { type: "button", disabled: from + PAGE >= names.length, onclick: () => turn(PAGE) }, "Next"));
  }

  function turn(step) {
    from += step;
    draw();
    refresh();
  }

  async function refresh() {
    const waiting = chosen().slice(from, from + PAGE);
    const work = async () => {
      while (waiting.length && !signal.aborted) {
        const name = waiting.shift();
        try {
          rows.set(name, await facts("row", { topic: name }, signal));
        } catch (error) {
          if (error.kind !== "missing") throw error;
          rows.delete(name);
        }
        draw();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  }

  draw();
  await view.every(EVERY_MS, async () => {
    found = await facts("topics", {}, signal);
    await refresh();
  });
}

function cells(name, row, columns) {
  const link = h("a", { href: `#/t/${encodeURIComponent(name)}` }, isolated(name));
  if (!row) return [link, ...columns.slice(1).map(() => "…")];
  return [
    link, records(row), sized(row.size_bytes), rate(row.records_per_s), row.bytes_per_s === null ? "–" : sized(row.bytes_per_s), whole(row.partitions),
    row.oldest_us === null ? "–" : age((row.now_us - row.oldest_us) / 1e6), lags(row.groups),
    ...(columns.includes("Shares") ? [sumsInACell(row.shares, row.all_shares)] : []), state(row),
  ];
}

/** The number of records, as far as it is counted. */
export function records(row) {
  if (row.records === null) return "–";
  if (row.records_are_all) return whole(row.records);
  return row.records ? h("span", { title: "The rest is not counted yet, or cannot be" }, `≥ ${whole(row.records)}`) : "counting…";
}

function lags(groups) {
  if (!groups.length) return h("span", { class: "quiet" }, "no group");
  return h("ul", { class: "plain" }, groups.slice(0, 3).map((each) => h("li", {}, isolated(each.name), " ", h("span", { class: each.bytes ? "" : "quiet" }, each.bytes ? `${sized(each.bytes)}, ${age(each.seconds)}` : "read all"))),
    groups.length > 3 && h("li", { class: "quiet" }, `and ${groups.length - 3} more`));
}

function state(row) {
  if (!row.troubles.length) return h("span", { class: "good" }, "✓ well");
  return h("span", { class: "bad" }, `⚠ ${row.troubles.map((each) => each.kind).filter((kind, at, all) => all.indexOf(kind) === at).join(", ")}`);
}

function drawWrong(section, rows) {
  const found = rows.flatMap((row) => row.troubles.map((trouble) => ({ row, trouble })));
  put(section, found.length > 0 && h("h2", {}, "What is wrong"), found.length > 0 && h("ul", { class: "troubles" }, found.slice(0, 12).map(({ row, trouble }) => troubleOf(trouble, row))),
    found.length > 12 && h("p", { class: "quiet" }, `and ${found.length - 12} more, on the pages of the topics`));
}

/** One thing that is wrong, with the next command. */
export function troubleOf(trouble, row = null) {
  return h("li", {}, h("strong", { class: "bad" }, `⚠ ${trouble.kind}`), row && [" in ", h("a", { href: `#/t/${encodeURIComponent(row.name)}` }, isolated(row.name))],
    h("p", {}, h("bdi", {}, shown(trouble.text))), trouble.command && h("p", {}, "Next: ", command(trouble.command)));
}
