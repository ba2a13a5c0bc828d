// The lines of an estimate before a job starts.
import { about, type ForecastRange, type JobForecast } from "./forecast";
import { bytes, count } from "./format";

/** A middle with its range; the range is left out where it says no more. */
export function spread(range: ForecastRange, text: (value: number) => string): string {
  const [low, middle, high] = [range.low, range.middle, range.high].map(text);
  return low === high ? `${middle}` : `${middle} (${low} to ${high})`;
}

/** The lines of an estimate: names with values. */
export function forecastLines(found: JobForecast): [string, string][] {
  const cost = found.cost;
  return [
    ["Time", spread(found.left_ms, about)],
    ["Traffic up", spread(found.bytes_up, bytes)],
    ["Traffic down", spread(found.bytes_down, bytes)],
    ...(cost ? ([["Cost", `${cost.middle} (${cost.low} to ${cost.high}) of an escrow of ${found.escrow}`]] as [string, string][]) : []),
    ["Work", `${count(found.samples)} samples in about ${found.rounds} rounds`],
    ["Based on", found.reason],
  ];
}
