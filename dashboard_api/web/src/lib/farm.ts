// A job of independent items: its tiles, what is left of it, and a sweep's points.
import type { Farm } from "./types";

export type TileState = "done" | "part" | "out" | "doubted" | "untouched";

export interface Tile {
  number: number;
  first: number;
  items: number;
  settled: number;
  state: TileState;
}

export const TILE_WORDS: Record<TileState, string> = {
  done: "done",
  part: "partly done",
  out: "with a node",
  doubted: "done, after a doubted result",
  untouched: "waits",
};

/** Runs of items in order. A doubted tile says so once it is done: then two nodes have agreed. */
export function tilesOf(farm: Farm): Tile[] {
  const out = new Set<number>();
  for (const run of farm.open_runs) {
    const last = Math.floor((run.start + Math.max(1, run.items) - 1) / farm.tile_items);
    for (let tile = Math.floor(run.start / farm.tile_items); tile <= last; tile += 1) out.add(tile);
  }
  return Array.from({ length: Math.ceil(farm.items / farm.tile_items) }, (_, number) => {
    const first = number * farm.tile_items;
    const items = Math.min(farm.tile_items, farm.items - first);
    const settled = farm.settled_by_tile[number] ?? 0;
    return { number, first, items, settled, state: stateOf(settled, items, out.has(number), (farm.doubted_by_tile[number] ?? 0) > 0) };
  });
}

function stateOf(settled: number, items: number, isOut: boolean, isDoubted: boolean): TileState {
  if (settled >= items) return isDoubted ? "doubted" : "done";
  if (isOut) return "out";
  return settled > 0 ? "part" : "untouched";
}

/** Items a second of the nodes that have returned two results; null: none has. */
export function itemsPerS(farm: Farm): number | null {
  const speeds = Object.values(farm.nodes).flatMap((node) => (node.items_per_s === null ? [] : [node.items_per_s]));
  return speeds.length ? speeds.reduce((sum, speed) => sum + speed, 0) : null;
}

export function leftMs(farm: Farm): number | null {
  const speed = itemsPerS(farm);
  return speed ? (1000 * (farm.items - farm.settled_items)) / speed : null;
}

export interface ItemRow {
  item: number;
  node: string;
  value: unknown;
  error: string;
}

export interface Point {
  item: number;
  values: Record<string, string | number | boolean>;
  metric: number | null;
  steps: number | null;
  curve: { step: number; value: number }[];
  error: string;
}

interface PointValue {
  point?: Point["values"];
  metric?: number;
  steps?: number;
  curve?: Point["curve"];
}

export function pointsOf(rows: readonly ItemRow[]): Point[] {
  return rows.map(({ item, value, error }) => {
    const found = (typeof value === "object" && value !== null ? value : {}) as PointValue;
    return { item, values: found.point ?? {}, metric: found.metric ?? null, steps: found.steps ?? null, curve: found.curve ?? [], error };
  });
}

/** What points set, in the order in which it first occurs. */
export function keysOf(points: readonly Point[]): string[] {
  return [...new Set(points.flatMap((point) => Object.keys(point.values)))];
}

export interface Axis {
  name: string;
  /** Texts at their heights, of 0 to 1 from the bottom. */
  ticks: { text: string; at: number }[];
  /** Height of a point's value; null: it has none. */
  at: (point: Point) => number | null;
}

const LOG_FROM = 20;

/** An axis for each key and one for the metric, each from its least to its greatest value; by logarithms where values are far apart. */
export function axesOf(points: readonly Point[], keys: readonly string[], metric: string): Axis[] {
  return [...keys.map((key) => axisOf(key, points, (point) => point.values[key] ?? null)), axisOf(metric, points, (point) => point.metric)];
}

function axisOf(name: string, points: readonly Point[], of: (point: Point) => string | number | boolean | null): Axis {
  const values = points.map(of).filter((value) => value !== null);
  const numbers = values.filter((value) => typeof value === "number");
  if (numbers.length < values.length || numbers.length === 0) {
    const words = [...new Set(values.map(String))];
    const height = (word: string): number => (words.length < 2 ? 0.5 : words.indexOf(word) / (words.length - 1));
    return { name, ticks: words.map((text) => ({ text, at: height(text) })), at: (point) => heightOf(of(point), (value) => height(String(value))) };
  }
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  const scaled = low > 0 && high / low >= LOG_FROM ? Math.log : (value: number): number => value;
  const span = scaled(high) - scaled(low);
  const height = (value: number): number => (span > 0 ? (scaled(value) - scaled(low)) / span : 0.5);
  const ticks = span > 0 ? [low, high].map((value) => ({ text: short(value), at: height(value) })) : [{ text: short(low), at: 0.5 }];
  return { name, ticks, at: (point) => heightOf(of(point), (value) => height(Number(value))) };
}

function heightOf(value: string | number | boolean | null, height: (value: string | number | boolean) => number): number | null {
  return value === null ? null : height(value);
}

export const short = (value: number): string => String(Number(value.toPrecision(4)));

/** A curve as the points of an SVG polyline in a box; empty: it has fewer than two values. */
export function curvePoints(curve: Point["curve"], width: number, height: number, low: number, high: number): string {
  const last = curve.at(-1)?.step ?? 0;
  if (curve.length < 2 || last === 0) return "";
  const span = high - low || 1;
  return curve.map(({ step, value }) => `${((width * step) / last).toFixed(1)},${(height - (height * (value - low)) / span).toFixed(1)}`).join(" ");
}
