// The parts of a long list, one at a time.

import { h } from "./dom.js";
import { plural, whole } from "./format.js";

/** Buttons that turn to another part; nothing if the list has one part. */
export function pager(from, page, total, word, turn) {
  if (total <= page) return null;
  return h("nav", { class: "pages", "aria-label": "Pages" },
    h("button", { type: "button", disabled: from === 0, onclick: () => turn(0) }, "First"),
    h("button", { type: "button", disabled: from === 0, onclick: () => turn(Math.max(0, from - page)) }, "Previous"),
    ` ${whole(from + 1)} to ${whole(Math.min(total, from + page))} of ${plural(total, word)} `,
    h("button", { type: "button", disabled: from + page >= total, onclick: () => turn(from + page) }, "Next"),
    h("button", { type: "button", disabled: from + page >= total, onclick: () => turn(Math.floor((total - 1) / page) * page) }, "Last"));
}
