// A job's whole course in few points, for what its feed has let go of. Each point keeps the extremes of what it joins.
import { get } from "./api";
import type { Job, Round } from "./types";

export const COURSE_NAMES = ["loss", "metric", "held_out_loss", "samples_per_s", "forecast_error", "accepted_share"] as const;
export type CourseName = (typeof COURSE_NAMES)[number];
type Values = (number | null)[];

export interface Course {
  /** Of each point's first round, ascending. */
  at_ms: number[];
  moved_bytes: number[];
  round: number[];
  series: Record<CourseName, { min: Values; max: Values; mean: Values }>;
  /** Further metrics by name. */
  further: Record<string, Values>;
}

const FURTHER = "metric/";

const POINTS = 800;

export async function fetchedCourse(job: string, metrics: readonly string[]): Promise<Course> {
  const names = [...COURSE_NAMES, ...metrics.map((each) => FURTHER + each)].join(",");
  const answer = await get<Omit<Course, "further">>(`jobs/${encodeURIComponent(job)}/series?names=${encodeURIComponent(names)}&points=${POINTS}`);
  const series: Record<string, { mean: Values }> = answer.series;
  return { ...answer, further: Object.fromEntries(metrics.map((each) => [each, series[FURTHER + each]?.mean ?? []])) };
}

export async function fetchedRounds(job: string, first: number, last: number): Promise<Round[]> {
  return (await get<{ rounds: Round[] }>(`jobs/${encodeURIComponent(job)}/rounds?from=${first}&to=${last}`)).rounds;
}

/** Number of the oldest round that the feed has kept; 0 when it has all of them, or none is there yet. */
export function oldestRound(job: Job): number {
  let least = Infinity;
  for (const number in job.rounds_by_number) least = Math.min(least, Number(number));
  return least === Infinity ? 0 : least;
}

/** Place of the newest point that is not after a moment; -1: all are after it. */
export function coursePlace(course: Course, at_ms: number): number {
  let low = 0;
  let high = course.at_ms.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((course.at_ms[middle] ?? Infinity) <= at_ms) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** About which round was open at a moment before `oldest`: points stand at the ends of rounds. */
export function roundNear(course: Course, at_ms: number, job: Job, oldest: number): number {
  const place = coursePlace(course, at_ms);
  const [from_ms, from] = place < 0 ? [job.created_at_ms, 0] : [course.at_ms[place] ?? 0, (course.round[place] ?? 0) + 1];
  const to_ms = course.at_ms[place + 1] ?? job.rounds_by_number[oldest]?.started_at_ms ?? at_ms;
  const to = Math.min(oldest, (course.round[place + 1] ?? oldest) + 1);
  const share = to_ms > from_ms ? Math.min(1, (at_ms - from_ms) / (to_ms - from_ms)) : 0;
  return Math.max(0, Math.min(oldest - 1, Math.floor(from + share * (to - from))));
}
