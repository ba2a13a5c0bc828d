// A job as it was at a moment, out of what its rounds and events tell. The scrubber replays a running job with this.
import { coursePlace, oldestRound, type Course } from "./course";
import type { EventKind, Job, Lane, Round, Segment } from "./types";

function segmentsAt(segments: readonly Segment[], at_ms: number): Segment[] {
  return segments
    .filter((each) => each.start_ms <= at_ms)
    .map((each) => (each.end_ms !== null && each.end_ms > at_ms ? { ...each, end_ms: null } : each));
}

/** When a lane's update was in: the end of what came before its last wait; null when it never was. */
export function arrivedAt(lane: Lane): number | null {
  if (lane.result !== "accepted" && lane.result !== "rejected") return null;
  return lane.segments.findLast((each) => !["wait", "pause", "rest"].includes(each.phase))?.end_ms ?? null;
}

function laneAt(lane: Lane, round: Round, at_ms: number): Lane {
  const segments = segmentsAt(lane.segments, at_ms);
  const decided = arrivedAt(lane) ?? round.ended_at_ms ?? Infinity;
  if (lane.result === "resting" || decided <= at_ms) return { ...lane, segments };
  return { ...lane, segments, result: "pending", result_reason: "", loss: null, update_bytes: 0, quality_bps: null };
}

function roundAt(round: Round, at_ms: number): Round {
  if (round.ended_at_ms !== null && round.ended_at_ms <= at_ms) return round;
  const lanes = Object.fromEntries(Object.entries(round.lanes).map(([node, lane]) => [node, laneAt(lane, round, at_ms)]));
  return {
    ...round,
    lanes,
    ended_at_ms: null,
    duration_ms: null,
    loss: null,
    metric: null,
    held_out_loss: null,
    metrics: {},
    samples_per_s: null,
    forecast_error: null,
    reason: "",
  };
}

export function sortedRounds(job: Job): Round[] {
  return Object.values(job.rounds_by_number).sort((a, b) => a.number - b.number);
}

const PHASE_EVENTS: Record<string, string> = {
  JobCreated: "preparing",
  ModelInitialised: "waiting",
  RoundPlanned: "training",
  JobPaused: "paused",
  JobResumed: "training",
} satisfies Partial<Record<EventKind, string>>;

function phaseAt(job: Job, at_ms: number): string {
  if (job.ended_at_ms !== null && job.ended_at_ms <= at_ms) return job.phase;
  const known = job.events.filter((each) => each.at_ms <= at_ms && each.kind in PHASE_EVENTS).at(-1);
  return known ? (PHASE_EVENTS[known.kind] ?? job.phase) : "training";
}

function last<T>(values: readonly (T | null)[]): T | null {
  return values.findLast((each) => each !== null) ?? null;
}

/** What was done until a moment. Rounds that the feed let go of count by what came after them, or by the course. */
function totalsAt(job: Job, kept: readonly Round[], at_ms: number, course: Course | null): Pick<Job, "bytes_up" | "bytes_down" | "samples"> {
  const oldest = oldestRound(job);
  const inTime = (round: Round): boolean => round.ended_at_ms !== null && round.ended_at_ms <= at_ms;
  const sum = (rounds: readonly Round[], pick: (round: Round) => number): number => rounds.reduce((all, each) => all + pick(each), 0);
  const done = kept.filter(inTime);
  if (oldest === 0) return { bytes_up: sum(done, (each) => each.bytes_up), bytes_down: sum(done, (each) => each.bytes_down), samples: sum(done, (each) => each.samples) };
  if (done.length || !course) {
    const later = kept.filter((each) => !inTime(each));
    return { bytes_up: job.bytes_up - sum(later, (each) => each.bytes_up), bytes_down: job.bytes_down - sum(later, (each) => each.bytes_down), samples: job.samples - sum(later, (each) => each.samples) };
  }
  const share = (course.moved_bytes[coursePlace(course, at_ms)] ?? 0) / Math.max(1, job.bytes_up + job.bytes_down);
  return { bytes_up: Math.round(job.bytes_up * share), bytes_down: Math.round(job.bytes_down * share), samples: Math.round(job.samples * share) };
}

/** The newest of a series until a moment. */
function courseValue(course: Course | null, name: "loss" | "metric" | "samples_per_s", at_ms: number): number | null {
  return course ? last(course.series[name].mean.slice(0, coursePlace(course, at_ms) + 1)) : null;
}

/**
 * The job at a moment.
 *
 * `older` are rounds that the feed let go of, as far as they were fetched; `course` tells of all of them.
 */
export function jobAt(job: Job, at_ms: number, older: Record<string, Round> = {}, course: Course | null = null): Job {
  const kept = sortedRounds(job);
  const all = [...Object.values(older).filter((each) => !(each.number in job.rounds_by_number)).sort((a, b) => a.number - b.number), ...kept];
  const rounds = all.filter((each) => each.started_at_ms <= at_ms).map((each) => roundAt(each, at_ms));
  const done = rounds.filter((each) => each.ended_at_ms !== null);
  const totals = totalsAt(job, kept, at_ms, course);
  const moved = job.bytes_up + job.bytes_down;
  const newest = (name: "loss" | "metric" | "samples_per_s"): number | null => last(done.map((each) => each[name])) ?? courseValue(course, name, at_ms);
  return {
    ...job,
    ...totals,
    rounds_by_number: Object.fromEntries(rounds.map((each) => [each.number, each])),
    events: job.events.filter((each) => each.at_ms <= at_ms),
    samples_of_output: job.samples_of_output.filter((each) => each.at_ms <= at_ms),
    phase: phaseAt(job, at_ms),
    ended_at_ms: job.ended_at_ms !== null && job.ended_at_ms <= at_ms ? job.ended_at_ms : null,
    round: done.length ? (done.at(-1)?.number ?? 0) + 1 : course ? (course.round[coursePlace(course, at_ms)] ?? -1) + 1 : 0,
    reason: "",
    levels: {},
    eta_ms: null,
    naive_bytes: moved ? Math.round(job.naive_bytes * ((totals.bytes_up + totals.bytes_down) / moved)) : 0,
    cost: job.samples ? String(Math.round(Number(job.cost) * (totals.samples / job.samples))) : "0",
    samples_per_s: newest("samples_per_s"),
    loss: newest("loss"),
    metric: newest("metric"),
  };
}
