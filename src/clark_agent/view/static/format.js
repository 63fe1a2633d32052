// Numbers, times and sizes for people.

const count = new Intl.NumberFormat("en-US");
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

/** 12,345 */
export function number(value) {
  return value === null || value === undefined ? "–" : count.format(value);
}

/** 950, 12.3k, 1.2M */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return String(value);
  if (value < 999_500) return `${(value / 1000).toFixed(value < 99_500 ? 1 : 0)}k`;
  return `${(value / 1_000_000).toFixed(1)}M`;
}

/** The time between two moments, or of a number of milliseconds. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** A cost in dollars: enough digits to be more than nothing. */
export function cost(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "$0";
  return `$${value < 0.01 ? value.toPrecision(2) : value.toFixed(value < 1 ? 3 : 2)}`;
}

/** 14:03:22, and the day if it is not today. */
export function moment(ms) {
  const at = new Date(ms);
  if (Number.isNaN(at.getTime())) return "–";
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`;
}

/** "5 min ago" */
export function ago(ms) {
  const seconds = (Date.now() - ms) / 1000;
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 45) return "just now";
  if (seconds < 3600) return `${Math.max(1, Math.round(seconds / 60))} min ago`;
  if (seconds < 86_400) return `${Math.round(seconds / 3600)} h ago`;
  return day.format(new Date(ms));
}

/** 12.4 KB */
export function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 1_000_000) return `${(bytes / 1000).toFixed(1)} KB`;
  return `${(bytes / 1_000_000).toFixed(1)} MB`;
}

/** "1 turn", "3 turns" */
export function plural(many, one) {
  return `${number(many)} ${one}${many === 1 ? "" : "s"}`;
}
