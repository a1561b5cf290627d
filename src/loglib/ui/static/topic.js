// One topic: charts, partitions, policies, copies, its archive; and the segments of a partition.

import { facts } from "./api.js";
import { chart } from "./chart.js";
import { command, h, isBusy, isolated, put, redraw, shown, table } from "./dom.js";
import { age, plural, rate, sized, when, whole } from "./format.js";
import { pager } from "./pages.js";
import { sumsTable } from "./shares.js";
import { records, troubleOf } from "./topics.js";

const EVERY_MS = 2000;
const PAGE = 100;
const MOST_LINES = 6; // groups in the chart of lag

export async function showTopic(view) {
  const { main, args: [name], signal } = view;
  const samples = [];
  const figures = h("dl", { class: "figures" }), wrong = h("section"), charts = h("div", { class: "charts" });
  const shares = h("section"), partitions = h("section"), rest = h("section");
  let drawn = "";
  put(main, h("h1", {}, isolated(name)), wrong, figures, charts, shares, partitions, rest);
  const page = pagedPartitions(view, name, partitions);
  await view.every(EVERY_MS, async () => {
    const topic = await facts("topic", { topic: name }, signal);
    const news = await facts("samples", { topic: name, after: samples.at(-1)?.time_us ?? 0 }, signal).catch((error) => { if (signal.aborted) throw error; return { samples: [] }; });
    samples.push(...news.samples);
    while (samples.length > 450) samples.shift();
    const row = topic.row;
    put(figures, figure("Records", records(row)), figure("Size", sized(row.size_bytes)), figure("Records/s", rate(row.records_per_s)),
      figure("Bytes/s", row.bytes_per_s === null ? "–" : sized(row.bytes_per_s)), figure("Partitions", whole(row.partitions)),
      figure("Oldest record", row.oldest_us === null ? "–" : age((row.now_us - row.oldest_us) / 1e6)),
      figure("Newest record", row.newest_us === null ? "–" : `${age((row.now_us - row.newest_us) / 1e6)} ago`));
    if (!isBusy(wrong)) put(wrong, row.troubles.length > 0 && [h("h2", {}, "What is wrong"), h("ul", { class: "troubles" }, row.troubles.map((each) => troubleOf(each)))]);
    put(charts, drawCharts(samples));
    if (!isBusy(shares)) redraw(shares, row.shares.length > 0 && [h("h2", {}, "Shares"), sumsTable(name, row.shares, row.all_shares)]);
    const text = JSON.stringify([topic.policies, topic.copies, topic.archive, topic.rooms, topic.role]);
    if (text !== drawn) { put(rest, details(topic)); drawn = text; }
    await page();
  });
}

function figure(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

function drawCharts(samples) {
  const points = (value) => samples.map((each) => [each.time_us, value(each)]);
  const groups = [...new Set(samples.flatMap((each) => Object.keys(each.lag_seconds)))].sort();
  const lag = groups.slice(0, MOST_LINES).map((group) => ({ name: group, points: points((each) => each.lag_seconds[group] ?? null) }));
  return [
    chart("Records per second", [{ points: points((each) => each.records_per_s) }], rate),
    chart("Bytes per second", [{ points: points((each) => each.bytes_per_s) }], sized),
    chart("Size", [{ points: points((each) => each.size_bytes) }], sized),
    chart("Lag of groups", lag, age),
  ];
}

/** The partitions in parts; returns the function that reads the shown part again. */
function pagedPartitions(view, name, section) {
  let from = 0;
  const refresh = async () => {
    const { partitions, total } = await facts("partitions", { topic: name, from, count: PAGE }, view.signal);
    const base = `#/t/${encodeURIComponent(name)}`;
    redraw(section, h("h2", {}, "Partitions"), table("Partitions", [">Partition", ">From offset", ">To offset", ">Size", ">Segments", "Oldest", "Newest", "Writer", ""],
      partitions.map((each) => ({ attributes: { "data-row": `p${each.partition}`, tabindex: "-1" }, cells: [
        h("a", { href: `${base}/segments/${each.partition}` }, each.partition), each.log_start_offset, each.high_watermark, sized(each.size_bytes), whole(each.segments),
        when(each.oldest_us), when(each.newest_us), each.is_written === null ? "not shown here" : each.is_written ? "yes" : "none",
        h("a", { href: `${base}/records?partition=${each.partition}` }, "records"),
      ] }))), pager(from, PAGE, total, "partition", (to) => { from = to; refresh(); }));
  };
  return async () => { if (!isBusy(section)) await refresh(); };
}

function details(topic) {
  const { policies, copies, archive, rooms } = topic;
  const found = [];
  if (copies.length || topic.role !== "leader") {
    found.push(h("h2", {}, "Copies"), topic.role !== "leader" && h("p", {}, `This directory is a ${topic.role}`, topic.role_of && [" of ", h("code", {}, shown(topic.role_of))], "."));
    if (copies.length) {
      found.push(table("Copies", ["Directory", ">Lacks", ">For", "State"], copies.map((each) => [
        h("code", {}, shown(each.path)), sized(each.lag_bytes), age(each.lag_seconds), each.error ? h("span", { class: "bad" }, "⚠ ", isolated(each.error)) : h("span", { class: "good" }, "✓ it is read"),
      ])));
    }
  }
  if (archive) {
    found.push(h("h2", {}, archive.kind === "tier" ? "Tier" : "Archive"), h("p", {}, h("code", {}, shown(archive.path)), " ",
      archive.error ? h("span", { class: "quiet" }, isolated(archive.error)) : `${archive.records === null ? "" : plural(archive.records, "record") + ", "}${sized(archive.bytes)}, last added ${when(archive.committed_us)}; ${sized(archive.lacks_bytes)} of the log are not in it yet.`),
      h("p", {}, "Next: ", command(archive.command)));
  }
  found.push(h("h2", {}, "Policies"), h("dl", { class: "pairs" }, Object.entries(policies).flatMap(([name, value]) => pair(name, value))));
  found.push(h("h2", {}, "Disk"), h("dl", { class: "pairs" }, Object.entries(rooms).flatMap(([path, [free, total]]) => [h("dt", {}, h("code", {}, shown(path))), h("dd", {}, `${sized(free)} of ${sized(total)} are free`)])),
    h("p", { class: "quiet" }, `log id ${topic.log_id}`));
  return found;
}

function pair(name, value) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) return Object.entries(value).flatMap(([inner, each]) => pair(`${name}.${inner}`, each));
  return [h("dt", {}, name), h("dd", {}, h("code", {}, shown(written(name, value))))];
}

/** The value of a policy as a person writes it. */
function written(name, value) {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.join(", ") || "none";
  if (name === "permissions") return value.toString(8);
  if (/(^|_|\.)bytes$/.test(name)) return value === 0 ? "0" : sized(value);
  return /(age|expiry|grace|interval)$/.test(name) ? age(value) : String(value);
}

// --- segments -----------------------------------------------------------------------------------------------

export async function showSegments(view) {
  const { main, args: [name, partition = "0"], signal } = view;
  let from = 0;
  const list = h("section");
  const { row } = await facts("topic", { topic: name }, signal);
  const field = h("input", { type: "number", min: 0, max: Math.max(0, row.partitions - 1), value: partition, "aria-label": "Partition", onchange: () => { location.hash = `#/t/${encodeURIComponent(name)}/segments/${field.value}`; } });
  put(main, h("h1", {}, "Segments of ", isolated(name)), h("p", {}, h("label", {}, "Partition ", field), ` of ${plural(row.partitions, "partition")}`), list);
  const refresh = async () => {
    const page = await facts("segments", { topic: name, partition, from, count: PAGE }, signal);
    redraw(list,
      h("p", {}, `${plural(page.total, "segment")}, ${sized(page.total_bytes)}. `, page.going ? h("strong", {}, `The next pass of retention drops ${whole(page.going)} of them, ${sized(page.going_bytes)}.`) : "Retention drops none of them now."),
      h("p", {}, "The same in a shell: ", command(page.command)),
      table("Segments and why they stay", ["Decision", "Why", ">From offset", ">Size", "Created", "Last append", "File"], page.segments.map((each) => [
        each.goes ? h("strong", { class: "bad" }, "goes") : each.is_sealed ? "stays" : "open",
        h("bdi", { class: "wrap" }, shown(each.reason)),
        h("a", { href: `#/t/${encodeURIComponent(name)}/records?partition=${partition}&from=${each.base_offset}` }, each.base_offset),
        sized(each.size_bytes), when(each.created_us), when(each.last_append_us), h("code", {}, each.name),
      ])), pager(from, PAGE, page.total, "segment", (to) => { from = to; refresh(); }));
  };
  await view.every(10000, async () => { if (!isBusy(list)) await refresh(); });
}
