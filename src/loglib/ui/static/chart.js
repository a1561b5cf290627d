// Charts of the last minutes, as SVG that this page draws.

import { h, svg } from "./dom.js";

const WIDTH = 320, HEIGHT = 120, LEFT = 62, RIGHT = 6, TOP = 10, BOTTOM = 20;
const KINDS = 6; // colours of lines

/** A chart of lines. Each has a name and points [microseconds, value or null]. `text` writes a value. */
export function chart(title, lines, text) {
  const points = lines.flatMap((line) => line.points.filter(([, value]) => value !== null));
  const latest = lines.map((line) => `${line.name ? line.name + " " : ""}${text(lastOf(line))}`).join(", ");
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), h("strong", {}, lines.length === 1 ? text(lastOf(lines[0])) : "")));
  if (points.length < 2) {
    figure.append(h("p", { class: "quiet" }, lines.length ? "The first samples come within seconds." : "No group reads this topic."));
    return figure;
  }
  const times = points.map(([time]) => time);
  const from = Math.min(...times), to = Math.max(...times);
  const top = niceTop(Math.max(...points.map(([, value]) => value)));
  const x = (time) => LEFT + ((time - from) / Math.max(1, to - from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: now ${latest}` });
  for (const part of [0, 0.5, 1]) {
    drawing.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(top * part), y2: y(top * part) }),
      svg("text", { class: "axis", x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, text(top * part).replace(".0 ", " ")));
  }
  const minutes = (to - from) / 60e6;
  drawing.append(
    svg("text", { class: "axis", x: LEFT, y: HEIGHT - 5 }, minutes < 1 ? `${Math.round(minutes * 60)} s ago` : `${Math.round(minutes)} min ago`),
    svg("text", { class: "axis", x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, "now"));
  lines.forEach((line, at) => drawing.append(svg("path", { class: `line kind-${at % KINDS}`, d: path(line.points, x, y) })));
  figure.append(drawing);
  if (lines.length > 1) {
    figure.append(h("ul", { class: "legend" }, lines.map((line, at) => h("li", {}, h("i", { class: `kind-${at % KINDS}` }), h("bdi", {}, line.name), " ", text(lastOf(line))))));
  }
  return figure;
}

function path(points, x, y) {
  let drawn = "", is_down = false;
  for (const [time, value] of points) {
    if (value === null) { is_down = false; continue; }
    drawn += `${is_down ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    is_down = true;
  }
  return drawn;
}

function lastOf(line) {
  const found = line.points.filter(([, value]) => value !== null).at(-1);
  return found ? found[1] : null;
}

/** The least round number that is not below the value. */
function niceTop(value) {
  if (value <= 0) return 2;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((each) => each * size).find((each) => each >= value * 0.999);
}
