// The consumer groups of a topic, and its shares.

import { facts } from "./api.js";
import { command, h, isBusy, isolated, put, redraw, since, table } from "./dom.js";
import { age, plural, sized, whole } from "./format.js";
import { shareList } from "./shares.js";

const MOST = 200; // partitions of a group that are listed

export async function showGroups(view) {
  const { main, args: [name], signal } = view;
  const list = h("section"), shares = h("section");
  put(main, h("h1", {}, "Groups of ", isolated(name)), list, h("h1", {}, "Shares of ", isolated(name)), shares);
  const refresh = shareList(view, name, shares);
  await view.every(2000, async () => {
    const groups = await facts("groups", { topic: name }, signal);
    const { row } = await facts("topic", { topic: name }, signal);
    if (!isBusy(list)) redraw(list, groups.length ? groups.map((group) => draw(group, row)) : h("p", { class: "quiet" }, "No group reads this topic. Looking here joins none."));
    await refresh();
  });
}

function draw(group, row) {
  const found = [h("h2", {}, isolated(group.name))];
  if (group.stored_with) return h("article", {}, found, h("p", {}, "It is stored with the topic ", h("a", { href: `#/t/${encodeURIComponent(group.stored_with)}/groups` }, isolated(group.stored_with)), "."));
  if (group.error) return h("article", {}, found, h("p", { class: "bad" }, "⚠ ", isolated(group.error)));
  const now = Date.now();
  found.push(h("p", {}, group.lag_bytes ? `It lags by ${sized(group.lag_bytes)}; its next record is ${age(group.lag_seconds)} old. ` : "It has read everything. ", plural(group.members.length, "member"), ". ", command(group.command)));
  if (group.members.length) {
    found.push(table("Members", ["Member", "Owns partitions", "Since", ">Process", "Host", "Strategy"], group.members.map((each) => [
      isolated(each.name), each.owns.length ? ranges(each.owns) : h("span", { class: "quiet" }, "none"), since(each.since, now), each.pid || "–", isolated(each.host || "–"), each.strategy || "–",
    ])));
  } else {
    found.push(h("p", { class: "quiet" }, "No member is there: nobody reads for this group now."));
  }
  found.push(table("Partitions", [">Partition", "Owner", ">Committed", ">End", ">Lag", ">Lag time", "Last commit"], group.partitions.slice(0, MOST).map((each) => [
    each.partition, each.owner === null ? h("span", { class: "quiet" }, "nobody") : isolated(each.owner || "(it is just claimed)"),
    each.committed === null ? "–" : each.has_lost ? h("strong", { class: "bad", title: "The log begins above this offset: the group has lost records" }, `⚠ ${each.committed}`) : each.committed,
    each.high_watermark, sized(each.lag_bytes), each.lag_bytes ? age(each.lag_seconds) : "–",
    each.committed_us === null ? "never" : [`${age((row.now_us - each.committed_us) / 1e6)} ago by `, isolated(each.committed_by)],
  ])));
  if (group.partitions.length > MOST) found.push(h("p", { class: "quiet" }, `and ${whole(group.partitions.length - MOST)} more partitions`));
  return h("article", {}, found);
}

/** Numbers as ranges: 0 to 3, 7. */
function ranges(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first} to ${last}`)).join(", ");
}
