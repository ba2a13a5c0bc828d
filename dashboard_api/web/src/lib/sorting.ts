// Sorting of tables: what is not known comes last in both directions.
export type Direction = 1 | -1;
export type Key = string | number | null | undefined;

/** Made once: `localeCompare` with a locale makes one for each pair. */
const ORDER = new Intl.Collator("en", { numeric: true });

const isMissing = (key: Key): boolean => key === null || key === undefined || (typeof key === "number" && Number.isNaN(key));

export function compared(a: Key, b: Key, direction: Direction): number {
  if (isMissing(a) || isMissing(b)) return Number(isMissing(a)) - Number(isMissing(b));
  if (typeof a === "number" && typeof b === "number") return (a - b) * direction;
  return ORDER.compare(String(a), String(b)) * direction;
}

export function sortedBy<T>(rows: readonly T[], key: (row: T) => Key, direction: Direction): T[] {
  return rows.toSorted((a, b) => compared(key(a), key(b), direction));
}
