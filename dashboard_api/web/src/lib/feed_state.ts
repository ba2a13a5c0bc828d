// What the page knows of the feed, and what a frame makes of it. Pure: feed.ts holds the socket.
import { applied } from "./changes";
import { EMPTY, type Frame, type Hello } from "./frames";
import type { State } from "./types";

export interface FeedState {
  hello: Hello | null;
  /** Number of the newest delta or snapshot in `state`; -1 before the first. */
  seq: number;
  at_ms: number;
  state: State;
  has_state: boolean;
  /** A delta was missed: only a snapshot helps. */
  is_broken: boolean;
}

export const NOTHING: FeedState = { hello: null, seq: -1, at_ms: 0, state: EMPTY, has_state: false, is_broken: false };

export function received(feed: FeedState, frame: Frame): FeedState {
  switch (frame.type) {
    case "hello": {
      const isSame = feed.hello?.epoch === frame.epoch;
      return { ...feed, hello: frame, is_broken: feed.has_state && !isSame };
    }
    case "snapshot":
      return { ...feed, seq: frame.seq, at_ms: frame.at_ms, state: frame.state, has_state: true, is_broken: false };
    case "delta":
      if (feed.is_broken || !feed.has_state || frame.seq <= feed.seq) return feed;
      if (frame.seq !== feed.seq + 1) return { ...feed, is_broken: true };
      return { ...feed, seq: frame.seq, at_ms: frame.at_ms, state: applied(feed.state, frame.changes) };
  }
}

/** The query of the next connection: it goes on after what is here, or starts afresh. */
export function resumeQuery(feed: FeedState): string {
  if (!feed.hello || !feed.has_state || feed.is_broken) return "";
  return `?epoch=${encodeURIComponent(feed.hello.epoch)}&seq=${feed.seq}`;
}

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 8000;

/** Time until the next attempt; `chance` in [0, 1) spreads the clients of a restarted server. */
export function backoffMs(attempt: number, chance: number): number {
  const most = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** attempt);
  return Math.round(most / 2 + (most / 2) * chance);
}
