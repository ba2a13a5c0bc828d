// A job's curves against time and against bytes, out of its rounds, and before them out of its course.
import type { Course } from "./course";
import { sortedRounds } from "./job_at";
import type { Job } from "./types";

const NAMES = ["loss", "metric", "samples_per_s", "forecast_error"] as const;
type Name = (typeof NAMES)[number];
type Values = (number | null)[];

export interface Curves extends Record<Name, Values> {
  /** Milliseconds since the job began, or bytes moved so far. */
  x: number[];
  /** Extremes of what a point joins, where points join several rounds; else empty. */
  least: Record<Name, Values>;
  most: Record<Name, Values>;
}

const none = (): Record<Name, Values> => ({ loss: [], metric: [], samples_per_s: [], forecast_error: [] });

/** `course` tells of the rounds before `oldest`, and of moments until `until_ms`. */
export function curves(job: Job, against: "time" | "bytes", course: Course | null = null, oldest = 0, until_ms = Infinity): Curves {
  const all: Curves = { x: [], ...none(), least: none(), most: none() };
  const rounds = sortedRounds(job).filter((each) => each.number >= oldest);
  const from_ms = rounds[0]?.started_at_ms ?? Infinity;
  if (course) addCourse(all, course, against, job.created_at_ms, Math.min(from_ms, until_ms));
  let moved = course ? (course.moved_bytes[Math.max(0, all.x.length - 1)] ?? 0) : 0;
  for (const round of rounds) {
    moved += round.bytes_up + round.bytes_down;
    if (round.ended_at_ms === null) continue;
    all.x.push(against === "bytes" ? moved : round.ended_at_ms - job.created_at_ms);
    for (const name of NAMES) for (const values of course ? [all[name], all.least[name], all.most[name]] : [all[name]]) values.push(round[name]);
  }
  return all;
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
  });
}
