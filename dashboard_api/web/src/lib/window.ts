// Which stretch of a job's time the timeline shows.
import { clamp, keepInside } from "./scale";
import type { Round } from "./types";

export interface Span {
  from: number;
  to: number;
}

const ROUND_PX = 230;
const LEAST_MS = 500;

/** The median duration of ended rounds, rounded so that a new round does not change the scale. */
export function usualRoundMs(rounds: readonly Round[]): number {
  const times = rounds.map((each) => each.duration_ms).filter((each) => each !== null && each > 0).sort((a, b) => Number(a) - Number(b));
  const middle = times[times.length >> 1] ?? rounds.map((each) => (each.deadline_at_ms ?? 0) - each.started_at_ms).find((each) => each > 0) ?? 10_000;
  return 1.3 ** Math.round(Math.log(middle) / Math.log(1.3));
}

/** A span that follows the newest moment, with room at its end for the open round. */
export function followingSpan(rounds: readonly Round[], now_ms: number, width: number, zoom: number): Span {
  const span = Math.max(LEAST_MS, (usualRoundMs(rounds) * Math.max(1, width / ROUND_PX)) / zoom);
  const newest = rounds.at(-1);
  const isOpen = newest !== undefined && newest.ended_at_ms === null;
  const to = isOpen ? Math.max(now_ms + span * 0.06, Math.min(newest.deadline_at_ms ?? 0, newest.started_at_ms + span * 0.7)) : Math.min(now_ms, newest?.ended_at_ms ?? now_ms) + span * 0.03;
  return { from: to - span, to };
}

export function zoomedSpan(span: Span, factor: number, around: number, limits: Span): Span {
  const most = Math.max(LEAST_MS, (limits.to - limits.from) * 1.02);
  const size = clamp((span.to - span.from) * factor, LEAST_MS, most);
  const share = (around - span.from) / (span.to - span.from || 1);
  return movedSpan({ from: around - share * size, to: around + (1 - share) * size }, 0, limits);
}

export function movedSpan(span: Span, by_ms: number, limits: Span): Span {
  const [from, to] = keepInside(span.from + by_ms, span.to + by_ms, limits.from, limits.to);
  return { from, to };
}
