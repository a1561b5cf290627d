// Figures as a person reads them.

const UNITS = ["bytes", "kB", "MB", "GB", "TB"];

export function sized(count) {
  if (count === null || count === undefined) return "–";
  let size = count, unit = 0;
  while (size >= 10000 && unit < UNITS.length - 1) { size /= 1000; unit += 1; }
  return unit === 0 ? plural(size, "byte") : `${size.toLocaleString("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 })} ${UNITS[unit]}`;
}

export function whole(count) {
  return count === null || count === undefined ? "–" : Math.round(count).toLocaleString("en");
}

/** A rate: whole from ten on, else with one digit. */
export function rate(count) {
  if (count === null || count === undefined) return "–";
  return count >= 10 || count === 0 ? whole(count) : count.toLocaleString("en", { maximumFractionDigits: 1 });
}

/** A duration in its largest unit and the next one. */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0) return `in ${age(-seconds)}`;
  if (seconds < 1) return seconds < 0.0005 ? "0 s" : `${Math.round(seconds * 1000)} ms`;
  const units = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const at = units.findIndex(([size]) => seconds >= size);
  const [size, unit] = units[at], next = units[at + 1];
  const first = `${Math.floor(seconds / size)} ${unit}`;
  const rest = next ? Math.floor((seconds % size) / next[0]) : 0;
  return rest ? `${first} ${rest} ${next[1]}` : first;
}

/** Microseconds UTC as a time; the number itself where no calendar has it. */
export function when(us) {
  if (us === null || us === undefined) return "–";
  const date = new Date(us / 1000);
  return isNaN(date) ? `${us} us` : date.toISOString().replace("T", " ").replace(/(\.\d*)?Z$/, "");
}

export function plural(count, word) {
  return `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
}
