// The shares of a topic: who has which record in hand, what waits, what is dead.

import { facts } from "./api.js";
import { h, isBusy, isolated, put, redraw, since, table } from "./dom.js";
import { age, plural, sized, when, whole } from "./format.js";
import { pager } from "./pages.js";

const SHARES = 10, PARTITIONS = 100, RECORDS = 50; // of a part
const DEAD = "Records that were rejected, or whose attempts are used up: they do not come again";
const LOST = "Records that retention has dropped after they were begun";

/** The shares of a topic in a table. */
export function sumsTable(topic, shares, total) {
  const link = `#/t/${encodeURIComponent(topic)}/groups`;
  return [table("Shares", ["Share", ">Members", ">In hand", ">Waiting", ">Free again", ">Accepted", ">Dead", ">Lost", ">Not begun"], shares.map((each) => each.error
    ? [h("a", { href: link }, isolated(each.name)), h("span", { class: "bad" }, "⚠ cannot be read"), "–", "–", "–", "–", "–", "–", "–"]
    : [h("a", { href: link }, isolated(each.name)), whole(each.members), whole(each.in_hand), whole(each.waiting), whole(each.free), whole(each.accepted), bad(each.dead, DEAD), bad(each.lost, LOST), sized(each.left_bytes)])),
  total > shares.length && h("p", { class: "quiet" }, `and ${whole(total - shares.length)} more`)];
}

/** A few words about each share, for a cell. */
export function sumsInACell(shares, total) {
  if (!shares.length) return h("span", { class: "quiet" }, "no share");
  return h("ul", { class: "plain short" }, shares.slice(0, 3).map((each) => h("li", {}, isolated(each.name), " ", each.error
    ? h("span", { class: "bad" }, "⚠ cannot be read")
    : [`${whole(each.in_hand)} in hand, ${whole(each.waiting)} waiting, `, each.free > 0 && `${whole(each.free)} free again, `,
      h("span", { class: each.dead ? "bad" : "quiet", title: DEAD }, `${whole(each.dead)} dead`), each.lost > 0 && [", ", h("span", { class: "bad", title: LOST }, `${whole(each.lost)} lost`)]])),
    total > 3 && h("li", { class: "quiet" }, `and ${whole(total - 3)} more`));
}

function bad(count, title) {
  return count ? h("strong", { class: "bad", title }, whole(count)) : "0";
}

/** The shares, each with its facts; returns the function that reads all that is shown again. */
export function shareList(view, topic, section) {
  const list = h("div"), pages = h("div"), none = h("p", { class: "quiet" }, "Nobody shares the records of this topic. Looking here joins nothing.");
  const drawn = new Map(); // by name: the function that reads the share again, and its element
  let from = 0;
  put(section, list, pages);
  const refresh = async () => {
    const { shares, total } = await facts("shares", { topic, from, count: SHARES }, view.signal);
    const names = shares.map((each) => each.name);
    for (const name of drawn.keys()) if (!names.includes(name)) drawn.delete(name);
    for (const name of names) if (!drawn.has(name)) drawn.set(name, shareArticle(view, topic, name));
    const elements = names.map((name) => drawn.get(name).article);
    if (elements.length !== list.children.length || elements.some((each, at) => each !== list.children[at])) put(list, elements);
    if (!names.length) put(list, none);
    if (!isBusy(pages)) put(pages, pager(from, SHARES, total, "share", (to) => { from = to; refresh(); }));
    for (const name of names) await drawn.get(name).refresh();
  };
  return refresh;
}

function shareArticle(view, topic, name) {
  const article = h("article", { class: "share" });
  const at = { from: 0, in_hand_from: 0, waiting_from: 0 };
  const turn = (key) => (to) => { at[key] = to; refresh(true); };
  async function refresh(asked = false) {
    let share;
    try {
      share = await facts("share", { topic, share: name, count: PARTITIONS, in_hand_count: RECORDS, waiting_count: RECORDS, ...at }, view.signal);
    } catch (error) {
      if (error.kind !== "wrong") throw error;
      put(article, h("h2", {}, isolated(name)), h("p", { class: "bad" }, "⚠ ", isolated(error.message)));
      return;
    }
    const { sums } = share;
    for (const [key, all, size] of [["from", share.all_partitions, PARTITIONS], ["in_hand_from", sums.in_hand, RECORDS], ["waiting_from", sums.waiting, RECORDS]]) {
      if (at[key] >= all) at[key] = Math.max(0, Math.floor((all - 1) / size) * size); // the list has become shorter
    }
    if (asked || !isBusy(article)) redraw(article, drawShare(topic, share, at, turn));
  }
  return { article, refresh };
}

function setting(key, value) {
  if (key === "max_in_hand" && !value) return "any";
  return typeof value === "number" ? whole(value) : value ?? "none";
}

function drawShare(topic, share, at, turn) {
  const { sums, settings } = share;
  const found = [h("h2", {}, isolated(sums.name))];
  if (sums.error) return [...found, h("p", { class: "bad" }, "⚠ ", isolated(sums.error))];
  found.push(h("p", {}, `${plural(sums.members, "member")}. `, sums.left_bytes ? `${sized(sums.left_bytes)} of the log are not begun. ` : "All of the log is begun. ",
    h("span", { class: "quiet" }, Object.entries(settings).map(([key, value]) => `${key} ${setting(key, value)}`).join(", "))));
  found.push(h("dl", { class: "figures" }, [["In hand", whole(sums.in_hand)], ["Waiting", whole(sums.waiting)], ["Free again", whole(sums.free)], ["Accepted", whole(sums.accepted)],
    ["Dead", bad(sums.dead, DEAD)], ["Lost", bad(sums.lost, LOST)]].map(([word, figure]) => h("div", {}, h("dt", {}, word), h("dd", {}, figure)))));
  if (share.members.length) {
    found.push(table("Members", ["Member", ">In hand", "Since", ">Process", "Host", "Boot"], share.members.map((each) => [
      each.name ? isolated(each.name) : h("span", { class: "quiet" }, "(it is just joining)"), whole(each.in_hand), since(each.since, share.now_us / 1000), each.pid || "–", isolated(each.host || "–"),
      h("span", { class: "quiet", title: "Of the machine: all members of a share run on one" }, isolated(each.boot.slice(0, 8) || "–")),
    ])));
    if (sums.members > share.members.length) found.push(h("p", { class: "quiet" }, `and ${whole(sums.members - share.members.length)} more members`));
  } else {
    found.push(h("p", { class: "quiet" }, "No member is there: nobody works on this share now."));
  }
  found.push(table("Partitions", [">Partition", ">Settled to", ">Next", ">Log from", ">Log to", ">In hand", ">Waiting", ">Free again", ">Accepted", ">Dead", ">Lost", "Oldest unsettled", "Fresh records"], share.partitions.map((each) => [
    each.partition, each.in_hand + each.waiting + each.free + each.left_bytes ? h("a", { href: `#/t/${encodeURIComponent(topic)}/records?partition=${each.partition}&from=${each.settled_to}` }, each.settled_to) : each.settled_to,
    each.next_offset, each.log_start_offset,
    each.high_watermark, whole(each.in_hand), whole(each.waiting), whole(each.free), whole(each.accepted), bad(each.dead, DEAD), bad(each.lost, LOST),
    each.oldest_us === null ? "–" : `${age((share.now_us - each.oldest_us) / 1e6)} ago`, blocked(each.blocked_by),
  ])), pager(at.from, PARTITIONS, share.all_partitions, "partition", turn("from")));
  if (sums.in_hand) {
    found.push(h("h3", {}, "In hand"), table("Records in hand, the longest first", [">Partition", ">Offset", ">Attempt", "Member", "Since"], share.in_hand.map((each) => ({
      attributes: { "data-row": `${sums.name} ${each.partition}:${each.offset}`, tabindex: "-1" }, cells: [
        each.partition, recordLink(topic, each.partition, each.offset), whole(each.attempt),
        each.member ? isolated(each.member) : h("span", { class: "bad" }, "⚠ it is dead, and nobody has taken the record back yet"),
        [`${age(Math.max(0, share.now_us - each.since_us) / 1e6)} `, h("span", { class: "quiet" }, when(each.since_us))],
      ],
    }))), pager(at.in_hand_from, RECORDS, sums.in_hand, "record", turn("in_hand_from")));
  }
  if (sums.waiting) {
    found.push(h("h3", {}, "Waiting"), table("Records that wait, the next to come first", [">Partition", ">Offset", ">Free in"], share.waiting.map((each) => [
      each.partition, recordLink(topic, each.partition, each.offset), age(each.seconds),
    ])), pager(at.waiting_from, RECORDS, sums.waiting, "record", turn("waiting_from")));
  }
  return found;
}

function recordLink(topic, partition, offset) {
  return h("a", { href: `#/t/${encodeURIComponent(topic)}/record/${partition}/${offset}` }, offset);
}

function blocked(by) {
  if (by === "window") return h("strong", { class: "bad" }, "⚠ the window is full");
  return by === "max_in_hand" ? "max_in_hand is reached" : h("span", { class: "quiet" }, "may be begun");
}
