// Curves of several jobs or runs on one axis, and how much sooner one reaches a target.
import { sortedRounds } from "./job_at";
import type { Job } from "./types";

export interface CurvePoint {
  time_ms: number;
  bytes: number;
  metric: number;
}

export interface Curve {
  name: string;
  points: CurvePoint[];
}

export type Axis = "time" | "bytes";

const along = (point: CurvePoint, axis: Axis): number => (axis === "time" ? point.time_ms : point.bytes);

/** Evaluations of a job; its time starts with its first round, so that waiting for nodes does not count. */
export function jobCurve(job: Job): Curve {
  const rounds = sortedRounds(job);
  const from_ms = rounds[0]?.started_at_ms ?? job.created_at_ms;
  const points: CurvePoint[] = [];
  let bytes = 0;
  for (const round of rounds) {
    bytes += round.bytes_up + round.bytes_down;
    if (round.metric !== null && round.ended_at_ms !== null) points.push({ time_ms: round.ended_at_ms - from_ms, bytes, metric: round.metric });
  }
  const strategy = job.spec["strategy"];
  const name = job.name || job.id;
  return { name: typeof strategy === "string" && !name.includes(strategy) ? `${name}, ${strategy}` : name, points };
}

/** Whether a curve's metric falls as its model learns, as a loss does: it ends below where it began. */
function falls(curve: Curve): boolean {
  const [first, last] = [curve.points[0], curve.points.at(-1)];
  return first !== undefined && last !== undefined && last.metric < first.metric;
}

/** Where a curve reaches the target, on the line between the evaluations before and after; null: nowhere. */
export function reachedAt(curve: Curve, axis: Axis, target: number): number | null {
  const isFalling = falls(curve);
  const place = curve.points.findIndex((point) => (isFalling ? point.metric <= target : point.metric >= target));
  const after = curve.points[place];
  if (!after) return null;
  const before = curve.points[place - 1];
  if (!before || after.metric === before.metric) return along(after, axis);
  const share = (target - before.metric) / (after.metric - before.metric);
  return along(before, axis) + share * (along(after, axis) - along(before, axis));
}

/** The best metric that all curves but those that never come near it reach. */
export function commonTarget(curves: readonly Curve[]): number {
  const drawn = curves.filter((curve) => curve.points.length > 0);
  if (drawn.length > 0 && drawn.every(falls)) {
    const least = drawn.map((curve) => Math.min(...curve.points.map((point) => point.metric))).sort((a, b) => a - b);
    return Math.ceil((least[1] ?? least[0] ?? 0) * 200) / 200;
  }
  const best = curves.map((curve) => Math.max(0, ...curve.points.map((point) => point.metric))).sort((a, b) => b - a);
  const second = best[1] ?? best[0] ?? 0;
  return Math.floor(second * 200) / 200;
}

/** Curves on the union of their places; null where one has no evaluation. */
export function joined(curves: readonly Curve[], axis: Axis): { x: number[]; rows: (number | null)[][] } {
  const x = [...new Set(curves.flatMap((curve) => curve.points.map((point) => along(point, axis))))].sort((a, b) => a - b);
  const rows = curves.map((curve) => {
    const known = new Map(curve.points.map((point) => [along(point, axis), point.metric]));
    return x.map((at) => known.get(at) ?? null);
  });
  return { x, rows };
}

/** A run that has ended keeps its last value: otherwise the median would jump to the runs that go on. */
function valueAt(curve: Curve, axis: Axis, at: number): number | null {
  const place = curve.points.findIndex((point) => along(point, axis) >= at);
  const after = curve.points[place];
  if (!after) return curve.points.at(-1)?.metric ?? null;
  const before = curve.points[place - 1];
  if (!before) return along(after, axis) === at ? after.metric : null;
  const share = (at - along(before, axis)) / (along(after, axis) - along(before, axis) || 1);
  return before.metric + share * (after.metric - before.metric);
}

export interface Band {
  least: (number | null)[];
  middle: (number | null)[];
  most: (number | null)[];
}

/** Least, median and most of runs that differ by their seed, at each place of `x`. */
export function band(curves: readonly Curve[], axis: Axis, x: readonly number[]): Band {
  const end = Math.max(...curves.map((curve) => along(curve.points.at(-1) ?? { time_ms: 0, bytes: 0, metric: 0 }, axis)));
  const columns = x.map((at) => at > end ? [] : curves.map((curve) => valueAt(curve, axis, at)).filter((each) => each !== null).sort((a, b) => a - b));
  return {
    least: columns.map((each) => each[0] ?? null),
    middle: columns.map((each) => (each.length ? ((each[(each.length - 1) >> 1] ?? 0) + (each[each.length >> 1] ?? 0)) / 2 : null)),
    most: columns.map((each) => each.at(-1) ?? null),
  };
}

export interface Spread {
  median: number;
  least: number;
  most: number;
}

export interface Standing {
  strategy: string;
  how: string;
  runs: number;
  runs_reached: number;
  runs_invalid: number;
  time_ms: Spread | null;
  bytes_up: Spread | null;
  bytes_down: Spread | null;
  metric: number | null;
  times_faster: number | null;
  times_fewer_bytes: number | null;
}

export interface Comparison {
  job: string;
  workload: string;
  world: string;
  backend: string;
  metric_name: string;
  target: number;
  baseline: string;
  strategies: Standing[];
  outcomes: { strategy: string; seed: number; how: string; evaluations: { at_ms: number; metric: number | null; bytes_up: number; bytes_down: number }[] }[];
}

export function comparisonCurves(result: Comparison, strategy: string): Curve[] {
  return result.outcomes
    .filter((run) => run.strategy === strategy)
    .map((run) => ({
      name: `${strategy}, seed ${run.seed}`,
      points: run.evaluations.flatMap((each) => (each.metric === null ? [] : [{ time_ms: each.at_ms, bytes: each.bytes_up + each.bytes_down, metric: each.metric }])),
    }));
}
