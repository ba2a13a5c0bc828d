// What the timeline shows, in words: for the tooltip, the table and screen readers.
import { duration, percent } from "./format";
import { arrivedAt } from "./job_at";
import type { Lane, LaneOutcome, NodePhase, Round } from "./types";

export const PHASES: NodePhase[] = ["download", "train", "encode", "upload", "wait", "pause", "rest"];

export const PHASE_TEXT: Record<NodePhase, string> = {
  download: "gets the model",
  train: "trains",
  encode: "compresses its update",
  upload: "sends its update",
  wait: "waits",
  pause: "is paused",
  rest: "rests",
};

export const RESULT_TEXT: Record<LaneOutcome, string> = {
  pending: "at work",
  accepted: "accepted",
  rejected: "rejected",
  handed_back: "handed back",
  lost: "no update",
  resting: "resting",
};

export function phaseTimes(lane: Lane, now_ms: number): [NodePhase, number][] {
  return PHASES.map((phase): [NodePhase, number] => [
    phase,
    lane.segments
      .filter((each) => each.phase === phase)
      .reduce((sum, each) => sum + Math.max(0, (each.end_ms ?? now_ms) - each.start_ms), 0),
  ]).filter(([, ms]) => ms > 0);
}

export function tookMs(lane: Lane, round: Round): number | null {
  const arrived = arrivedAt(lane);
  return arrived === null ? null : arrived - round.started_at_ms;
}

/** What the measured quality of an accepted update means for its pay; empty while none is measured. */
export function qualityText(lane: Lane): string {
  if (lane.quality_bps === null) return "";
  const share = percent(lane.quality_bps / 10_000, 0);
  if (lane.quality_bps === 0) return "Quality 0 %: measured as of no use to the model, so it earns nothing";
  return `Quality ${share}: it earns ${share} of the full pay for its samples`;
}

/** The forecast beside what it took: `forecast 2.0 s ± 0.3 s, took 2.1 s (5.0 % later)`. */
export function forecastText(lane: Lane, round: Round): string {
  const took = tookMs(lane, round);
  if (lane.forecast_ms === null) return took === null ? "no forecast yet" : `took ${duration(took)}; nothing was known to forecast it`;
  const spread = lane.forecast_spread_ms ? ` ± ${duration(lane.forecast_spread_ms)}` : "";
  const forecast = `forecast ${duration(lane.forecast_ms)}${spread}`;
  if (took === null) return forecast;
  const off = took / lane.forecast_ms - 1;
  const how = Math.abs(off) < 0.005 ? "as forecast" : `${percent(Math.abs(off), 0)} ${off > 0 ? "later" : "sooner"}`;
  return `${forecast}, took ${duration(took)} (${how})`;
}

export function laneSentence(name: string, lane: Lane, round: Round, now_ms: number): string {
  const times = phaseTimes(lane, now_ms).map(([phase, ms]) => `${phase} ${duration(ms)}`);
  const result = RESULT_TEXT[lane.result] + (lane.result_reason ? ` (${lane.result_reason})` : "");
  const plan = lane.reason ? ` Plan: ${lane.reason}.` : "";
  return `${name}, round ${round.number + 1}: ${result}. ${times.join(", ")}. ${forecastText(lane, round)}.${plan}`;
}

/** The moment at which enough updates were in; null before it, or where their number is not known. */
export function quorumAt(round: Round): number | null {
  const times = Object.values(round.lanes)
    .filter((each) => each.result === "accepted")
    .map(arrivedAt)
    .filter((each) => each !== null)
    .sort((a, b) => a - b);
  return times[round.updates_needed - 1] ?? null;
}
