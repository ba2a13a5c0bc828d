// Figures as people read them: real units, three digits, and nothing where nothing is known.
export const UNKNOWN = "–";
const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const BIT_UNITS = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
const COUNT_UNITS = ["", "k", "M", "G", "T"];

/** Made once: a number's own toLocaleString makes one each time, ten times as slow. */
const GROUPED = new Intl.NumberFormat("en-US");

type Maybe = number | null | undefined;

function isKnown(value: Maybe): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

function threeDigits(value: number): string {
  const size = Math.abs(value);
  if (size >= 100 || value === 0) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}

function scaled(value: Maybe, units: readonly string[], whole: boolean): string {
  if (!isKnown(value)) return UNKNOWN;
  let step = 0;
  let rest = value;
  while (Math.abs(rest) >= 999.5 && step < units.length - 1) {
    rest /= 1000;
    step += 1;
  }
  const digits = step === 0 && whole ? rest.toFixed(0) : threeDigits(rest);
  return `${digits} ${units[step] ?? ""}`.trimEnd();
}

export const bytes = (value: Maybe): string => scaled(value, BYTE_UNITS, true);
export const bitsPerS = (value: Maybe): string => scaled(value, BIT_UNITS, true);
export const count = (value: Maybe): string => scaled(value, COUNT_UNITS, true);
export const rate = (value: Maybe): string => scaled(value, COUNT_UNITS, false);

export const capital = (text: string): string => (text[0]?.toUpperCase() ?? "") + text.slice(1);

/** A pace: all its digits as long as they are few. */
export const pace = (value: Maybe): string => (isKnown(value) && value >= 100 && value < 100_000 ? whole(value) : rate(value));

export function whole(value: Maybe): string {
  return isKnown(value) ? GROUPED.format(Math.round(value)) : UNKNOWN;
}

/** A duration in its two largest units. */
export function duration(ms: Maybe): string {
  if (!isKnown(ms)) return UNKNOWN;
  const size = Math.abs(ms);
  if (size < 1) return size === 0 ? "0 ms" : `${ms.toFixed(2)} ms`;
  if (size < 1000) return `${Math.round(ms)} ms`;
  if (size < 99_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  const parts: [number, string][] = [
    [Math.floor(seconds / 86_400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [seconds % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount], place) => place === 0 || amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

export const micros = (us: Maybe): string => duration(isKnown(us) ? us / 1000 : null);

/** A share in [0, 1] as a percentage. */
export function percent(share: Maybe, digits = 1): string {
  return isKnown(share) ? `${(share * 100).toFixed(digits)} %` : UNKNOWN;
}

export function decimal(value: Maybe, digits = 3): string {
  return isKnown(value) ? value.toFixed(digits) : UNKNOWN;
}

export function ratio(value: Maybe): string {
  if (!isKnown(value)) return UNKNOWN;
  return `${value >= 100 ? GROUPED.format(Math.round(value)) : value.toFixed(value >= 10 ? 0 : 1)}×`;
}

/** An amount of the ledger's token, with at least two decimals where the token has them.

`most` cuts further decimals off; without it the amount is exact.
*/
export function money(units: string | null | undefined, decimals: number, most = decimals): string {
  if (!units || !/^-?\d+$/.test(units)) return UNKNOWN;
  const sign = units.startsWith("-") ? "−" : "";
  const digits = units.replace("-", "").padStart(decimals + 1, "0");
  const before = digits.slice(0, digits.length - decimals).replace(/\B(?=(\d{3})+$)/g, ",");
  const after = decimals ? digits.slice(-decimals).slice(0, most).replace(/0+$/, "").padEnd(Math.min(2, decimals), "0") : "";
  return after ? `${sign}${before}.${after}` : `${sign}${before}`;
}

/** Sum of decimal strings, exactly. */
export function sum(amounts: readonly string[]): string {
  return amounts.reduce((total, each) => total + (/^-?\d+$/.test(each) ? BigInt(each) : 0n), 0n).toString();
}

/** The share that `part` has of `all`, in [0, 1]. */
export function share(part: string, all: string): number {
  const most = Number(all);
  return most > 0 ? Math.min(1, Number(part) / most) : 0;
}

const two = (value: number): string => String(value).padStart(2, "0");

/** Time of day, in the reader's zone. */
export function clock(at_ms: Maybe): string {
  if (!isKnown(at_ms) || at_ms <= 0) return UNKNOWN;
  const at = new Date(at_ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function dateAndClock(at_ms: Maybe): string {
  if (!isKnown(at_ms) || at_ms <= 0) return UNKNOWN;
  const at = new Date(at_ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(at_ms)}`;
}

/** Time since a job began: `4:07`, `1:02:33`. */
export function elapsed(ms: Maybe): string {
  if (!isKnown(ms)) return UNKNOWN;
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const hours = Math.floor(seconds / 3600);
  const minutes = Math.floor(seconds / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(seconds % 60)}` : `${minutes}:${two(seconds % 60)}`;
}

export function ago(at_ms: Maybe, now_ms: number): string {
  if (!isKnown(at_ms) || at_ms <= 0) return UNKNOWN;
  const since = Math.max(0, now_ms - at_ms);
  return since < 2000 ? "just now" : `${duration(Math.floor(since / 1000) * 1000).replace(".0 s", " s")} ago`;
}

/** The metric of a job: accuracies are shares, everything else is a number. */
export function metric(name: string, value: Maybe): string {
  return /accuracy|share|top.?1/i.test(name) ? percent(value) : decimal(value);
}

/** A sentence with the names of its nodes, where it was written before they were known. */
export function withNames(text: string, names: Record<string, string>): string {
  return text.replace(/0x[0-9a-f]{8}\.\.\./g, (found) => Object.entries(names).find(([id, name]) => name && id.startsWith(found.slice(0, 10)))?.[1] ?? found);
}

export function shortId(id: string): string {
  return id.startsWith("0x") ? `${id.slice(0, 6)}…${id.slice(-4)}` : id;
}
