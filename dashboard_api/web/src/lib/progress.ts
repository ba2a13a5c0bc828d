// A job's curves against time and against bytes, out of its rounds.
import { sortedRounds } from "./job_at";
import type { Job } from "./types";

export interface Curves {
  /** Milliseconds since the job began, or bytes moved so far. */
  x: number[];
  loss: (number | null)[];
  metric: (number | null)[];
  samples_per_s: (number | null)[];
  forecast_error: (number | null)[];
}

export function curves(job: Job, against: "time" | "bytes"): Curves {
  const all: Curves = { x: [], loss: [], metric: [], samples_per_s: [], forecast_error: [] };
  let moved = 0;
  for (const round of sortedRounds(job)) {
    moved += round.bytes_up + round.bytes_down;
    if (round.ended_at_ms === null) continue;
    all.x.push(against === "bytes" ? moved : round.ended_at_ms - job.created_at_ms);
    all.loss.push(round.loss);
    all.metric.push(round.metric);
    all.samples_per_s.push(round.samples_per_s);
    all.forecast_error.push(round.forecast_error);
  }
  return all;
}
