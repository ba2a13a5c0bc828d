// A job's curves against time and against bytes, out of its rounds, and before them out of its course.
import type { Course } from "./course";
import { sortedRounds } from "./job_at";
import type { Job } from "./types";

const NAMES = ["loss", "metric", "held_out_loss", "samples_per_s", "forecast_error"] as const;
type Name = (typeof NAMES)[number];
type Values = (number | null)[];

export interface Curves extends Record<Name, Values> {
  /** Milliseconds since the job began, or bytes moved so far. */
  x: number[];
  /** Extremes of what a point joins, where points join several rounds; else empty. */
  least: Record<Name, Values>;
  most: Record<Name, Values>;
  /** Further metrics by name. */
  further: Record<string, Values>;
}

/** Names of the metrics beside a job's first one. */
export function furtherMetrics(job: Job): string[] {
  const evaluated = [job.initial?.metrics, ...Object.values(job.rounds_by_number).map((each) => each.metrics)];
  return [...new Set(evaluated.flatMap((each) => Object.keys(each ?? {})))].sort();
}

const none = (): Record<Name, Values> => ({ loss: [], metric: [], held_out_loss: [], samples_per_s: [], forecast_error: [] });

/** `course` tells of the rounds before `oldest`, and of moments until `until_ms`. */
export function curves(job: Job, against: "time" | "bytes", course: Course | null = null, oldest = 0, until_ms = Infinity): Curves {
  const further = Object.fromEntries(furtherMetrics(job).map((each): [string, Values] => [each, []]));
  const all: Curves = { x: [], ...none(), least: none(), most: none(), further };
  const rounds = sortedRounds(job).filter((each) => each.number >= oldest);
  const from_ms = rounds[0]?.started_at_ms ?? Infinity;
  if (oldest === 0) addInitial(all, job);
  if (course) addCourse(all, course, against, job.created_at_ms, Math.min(from_ms, until_ms));
  let moved = course ? (course.moved_bytes[Math.max(0, all.x.length - 1)] ?? 0) : 0;
  for (const round of rounds) {
    moved += round.bytes_up + round.bytes_down;
    if (round.ended_at_ms === null) continue;
    all.x.push(against === "bytes" ? moved : round.ended_at_ms - job.created_at_ms);
    for (const name of NAMES) for (const values of course ? [all[name], all.least[name], all.most[name]] : [all[name]]) values.push(round[name] ?? null);
    for (const [name, values] of Object.entries(all.further)) values.push(round.metrics?.[name] ?? null);
  }
  return all;
}

/** What the model scored before any training, where that is known. */
function addInitial(all: Curves, job: Job): void {
  const initial = job.initial;
  if (!initial) return;
  all.x.push(0);
  const values: Partial<Record<Name, number | null>> = { metric: initial.metric, held_out_loss: initial.loss };
  for (const name of NAMES) all[name].push(values[name] ?? null);
  for (const [name, further] of Object.entries(all.further)) further.push(initial.metrics[name] ?? null);
}

function addCourse(all: Curves, course: Course, against: "time" | "bytes", created_ms: number, until_ms: number): void {
  course.at_ms.forEach((at_ms, place) => {
    if (at_ms > until_ms) return;
    all.x.push(against === "bytes" ? (course.moved_bytes[place] ?? 0) : at_ms - created_ms);
    for (const name of NAMES) {
      const { min, mean, max } = course.series[name];
      all[name].push(mean[place] ?? null);
      all.least[name].push(min[place] ?? null);
      all.most[name].push(max[place] ?? null);
    }
    for (const [name, values] of Object.entries(all.further)) values.push(course.further[name]?.[place] ?? null);
  });
}
