// Histories of nodes: from the server, or out of a recording's own states.
import { get } from "./api";
import type { Moment } from "./recording";
import type { Node } from "./types";

export interface Series {
  x: number[];
  series: Record<string, { min: (number | null)[]; max: (number | null)[]; mean: (number | null)[] }>;
}

export type NodeKey = "rtt_us" | "loss" | "up_bits_per_s" | "down_bits_per_s" | "step_us" | "health_value";

export function fetchedHistory(id: string, names: readonly NodeKey[], points: number): Promise<Series> {
  return get<Series>(`nodes/${encodeURIComponent(id)}/history?names=${names.join(",")}&points=${points}`);
}

/** The same out of a recording: a value for each change of the node. */
export function recordedHistory(all: readonly Moment[], id: string, names: readonly NodeKey[], until_ms: number): Series {
  const answer: Series = { x: [], series: Object.fromEntries(names.map((name) => [name, { min: [], max: [], mean: [] }])) };
  let last: Node | undefined;
  for (const { at_ms, state } of all) {
    const node = state.nodes[id];
    if (!node || node === last || at_ms > until_ms) continue;
    last = node;
    answer.x.push(at_ms);
    for (const name of names) {
      const value = node[name] ?? null;
      for (const kind of ["min", "max", "mean"] as const) answer.series[name]?.[kind].push(value);
    }
  }
  return answer;
}

/** Mean of a series within each of `columns` equal stretches of time. */
export function columned(series: Series, name: NodeKey, from_ms: number, to_ms: number, columns: number): (number | null)[] {
  const sums = new Array<number>(columns).fill(0);
  const counts = new Array<number>(columns).fill(0);
  const width = (to_ms - from_ms) / columns || 1;
  series.x.forEach((at_ms, place) => {
    const value = series.series[name]?.max[place];
    const column = Math.floor((at_ms - from_ms) / width);
    if (value === null || value === undefined || column < 0 || column >= columns) return;
    sums[column] = (sums[column] ?? 0) + value;
    counts[column] = (counts[column] ?? 0) + 1;
  });
  const means = sums.map((sum, column) => (counts[column] ? sum / (counts[column] ?? 1) : null));
  const last = means.findLastIndex((each) => each !== null);
  // A reading holds until the next one.
  for (let column = 1; column <= last; column += 1) means[column] ??= means[column - 1] ?? null;
  return means;
}
