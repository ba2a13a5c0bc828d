// What a job takes until its end, as the coordinator forecasts it.
import { duration } from "./format";

export interface ForecastRange {
  low: number;
  middle: number;
  high: number;
}

export interface JobForecast {
  left_ms: ForecastRange;
  bytes_up: ForecastRange;
  bytes_down: ForecastRange;
  /** In the smallest units of the token, as digits; null: the job pays nothing. */
  cost: { low: string; middle: string; high: string } | null;
  escrow: string;
  samples: number;
  rounds: number;
  nodes: number;
  measured_nodes: number;
  reason: string;
}

/** A time as people estimate it: whole seconds. */
export const about = (ms: number): string => duration(Math.round(ms / 1000) * 1000).replace(".0 s", " s");

/** What is left of a forecast that was told some time ago. */
export function leftNow(found: JobForecast, passed_ms: number): ForecastRange {
  const { low, middle, high } = found.left_ms;
  const rest = (value: number): number => Math.max(0, value - passed_ms);
  return { low: rest(low), middle: rest(middle), high: rest(high) };
}
