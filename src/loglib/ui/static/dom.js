// Elements, made without HTML: text from a log is only ever the text of a node.

import { age, when } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children. A child that is a string is text; null and false are left out. */
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(9).filter((each) => each !== null && each !== undefined && each !== false);
}

/** Replace the children of an element. */
export function put(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** Replace the children of an element whose tables are the same with other figures: what is focused or scrolled stays. */
export function redraw(element, ...children) {
  const row = element.contains(document.activeElement) ? document.activeElement.closest("[data-row]")?.dataset.row : undefined;
  const scrolled = [...element.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  put(element, ...children);
  element.querySelectorAll(".scroll").forEach((each, at) => { each.scrollLeft = scrolled[at] ?? 0; });
  if (row !== undefined) element.querySelector(`[data-row="${CSS.escape(row)}"]`)?.focus({ preventScroll: true });
}

/** True while somebody uses a field or a button in the element, or has selected text in it: then it is not replaced. */
export function isBusy(element) {
  const active = document.activeElement, selection = getSelection();
  if (element.contains(active) && active.matches("button, input, select")) return true;
  return Boolean(selection && !selection.isCollapsed && element.contains(selection.anchorNode));
}

// Control characters except line ends and tabs, signs that turn the direction of writing, invisible ones, and halves of
// pairs. They are shown as escapes, so that no text can hide or reorder what is beside it. The two joiners stay: scripts
// and emoji need them.
const ODD = /[\u2028\u2029\u115f\u1160\u3164\uffa0]|(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}]/gu;

/** Text from a log as nodes: odd characters as marked escapes, the rest unchanged. */
export function shown(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(h("span", { class: "escape", title: "a character that would not be seen" }, escapeOf(match[0].codePointAt(0))));
    at = match.index + match[0].length;
  }
  nodes.push(text.slice(at));
  return nodes;
}

function escapeOf(code) {
  if (code === 13) return "\\r";
  const digits = code.toString(16);
  return code < 256 ? `\\x${digits.padStart(2, "0")}` : code < 65536 ? `\\u${digits.padStart(4, "0")}` : `\\u{${digits}}`;
}

/** Text from a log, kept apart from the direction of what stands around it. */
export function isolated(text, attributes = {}) {
  return h("bdi", attributes, shown(text));
}

/** Tell users of a screen reader. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** A table whose head is a list of names; a name that begins with ">" is of numbers. Cells may be nodes. */
export function table(caption, names, rows, attributes = {}) {
  const right = names.map((name) => name.startsWith(">"));
  const head = h("tr", {}, names.map((name, at) => h("th", { scope: "col", class: right[at] && "number" }, name.replace(/^>/, ""))));
  const lines = rows.map((row) => {
    const cells = Array.isArray(row) ? row : row.cells;
    return h("tr", row.attributes || {}, cells.map((cell, at) => h("td", { class: right[at] && "number", "data-name": names[at].replace(/^>/, "") }, cell)));
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", attributes, h("caption", { class: "hidden-text" }, caption), h("thead", {}, head), h("tbody", {}, lines)));
}

/** A command to type, with a button that copies it. */
export function command(text) {
  const button = h("button", { type: "button", class: "copy", title: "Copy the command", "aria-label": `Copy: ${text}`, onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
      say("copied");
    } catch {
      getSelection().selectAllChildren(code);
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } }, "copy");
  const code = h("code", {}, shown(text));
  return h("span", { class: "command" }, code, button);
}

/** How long ago a time in ISO 8601 was, and the time. It is text from a file, so it may be none. */
export function since(text, now) {
  const at = Date.parse(text);
  return isNaN(at) ? "–" : [`${age((now - at) / 1000)} `, h("span", { class: "quiet" }, when(at * 1000))];
}
