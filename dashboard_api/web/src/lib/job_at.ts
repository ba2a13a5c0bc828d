// A job as it was at a moment, out of what its rounds and events tell. The scrubber replays a running job with this.
import type { Job, Lane, Round, Segment } from "./types";

function segmentsAt(segments: readonly Segment[], at_ms: number): Segment[] {
  return segments
    .filter((each) => each.start_ms <= at_ms)
    .map((each) => (each.end_ms !== null && each.end_ms > at_ms ? { ...each, end_ms: null } : each));
}

/** When a lane's update was in: the end of what came before its last wait; null when it never was. */
export function arrivedAt(lane: Lane): number | null {
  if (lane.result !== "accepted" && lane.result !== "rejected") return null;
  return lane.segments.findLast((each) => each.phase !== "wait" && each.phase !== "rest")?.end_ms ?? null;
}

function laneAt(lane: Lane, round: Round, at_ms: number): Lane {
  const segments = segmentsAt(lane.segments, at_ms);
  const decided = arrivedAt(lane) ?? round.ended_at_ms ?? Infinity;
  if (lane.result === "resting" || decided <= at_ms) return { ...lane, segments };
  return { ...lane, segments, result: "pending", result_reason: "", loss: null, update_bytes: null, quality_bps: null };
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
};

function phaseAt(job: Job, at_ms: number): string {
  if (job.ended_at_ms !== null && job.ended_at_ms <= at_ms) return job.phase;
  const known = job.events.filter((each) => each.at_ms <= at_ms && each.kind in PHASE_EVENTS).at(-1);
  return known ? (PHASE_EVENTS[known.kind] ?? job.phase) : "training";
}

function last<T>(values: readonly (T | null)[]): T | null {
  return values.findLast((each) => each !== null) ?? null;
}

export function jobAt(job: Job, at_ms: number): Job {
  const rounds = sortedRounds(job).filter((each) => each.started_at_ms <= at_ms).map((each) => roundAt(each, at_ms));
  const done = rounds.filter((each) => each.ended_at_ms !== null);
  const total = (pick: (round: Round) => number): number => done.reduce((sum, each) => sum + pick(each), 0);
  const bytes_up = total((each) => each.bytes_up);
  const bytes_down = total((each) => each.bytes_down);
  const moved = job.bytes_up + job.bytes_down;
  const samples = total((each) => each.samples);
  return {
    ...job,
    rounds_by_number: Object.fromEntries(rounds.map((each) => [each.number, each])),
    events: job.events.filter((each) => each.at_ms <= at_ms),
    samples_of_output: job.samples_of_output.filter((each) => each.at_ms <= at_ms),
    phase: phaseAt(job, at_ms),
    ended_at_ms: job.ended_at_ms !== null && job.ended_at_ms <= at_ms ? job.ended_at_ms : null,
    round: done.length ? (done.at(-1)?.number ?? 0) + 1 : 0,
    reason: "",
    levels: {},
    eta_ms: null,
    bytes_up,
    bytes_down,
    naive_bytes: moved ? Math.round(job.naive_bytes * ((bytes_up + bytes_down) / moved)) : 0,
    samples,
    cost: job.samples ? String(Math.round(Number(job.cost) * (samples / job.samples))) : "0",
    samples_per_s: last(done.map((each) => each.samples_per_s)),
    loss: last(done.map((each) => each.loss)),
    metric: last(done.map((each) => each.metric)),
  };
}
