// A recording as a list of states by time. States share what did not change, so all of them fit in memory.
import { NOTHING, received } from "./feed_state";
import type { Frame } from "./frames";
import type { State } from "./types";

export interface Moment {
  at_ms: number;
  state: State;
}

export function moments(frames: readonly (readonly [number, Frame])[]): Moment[] {
  let feed = NOTHING;
  const all: Moment[] = [];
  for (const [at_ms, frame] of frames) {
    feed = received(feed, frame);
    if (feed.has_state) all.push({ at_ms, state: feed.state });
  }
  return all;
}

/** Place of the newest moment that is not after `at_ms`; 0 when all are. */
export function placeAt(all: readonly Moment[], at_ms: number): number {
  let low = 0;
  let high = all.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((all[middle]?.at_ms ?? Infinity) <= at_ms) low = middle;
    else high = middle - 1;
  }
  return low;
}
