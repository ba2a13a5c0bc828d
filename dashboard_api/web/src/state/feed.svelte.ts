// What the feed has brought, for all pages. The tree is replaced whole at each frame; see lib/changes.ts.
import { NOTHING, type FeedState } from "../lib/feed_state";
import type { State } from "../lib/types";
import { player } from "./player.svelte";

export type Link = "connecting" | "live" | "stale" | "disconnected" | "recorded";

class Feed {
  now = $state.raw<FeedState>(NOTHING);
  link = $state<Link>("connecting");
  link_reason = $state("");
  needs_login = $state(false);
  retry_at_ms = $state<number | null>(null);
  heard_at_ms = 0;

  take(next: FeedState): void {
    this.now = next;
  }

  /** Time by the server's clock; a recording has its player's. */
  clock(): number {
    if (player.isRecorded) return player.at_ms;
    if (this.link !== "live" || !this.now.at_ms) return this.now.at_ms;
    return this.now.at_ms + Math.max(0, Date.now() - this.heard_at_ms);
  }

  /** The tree that the page shows: the newest, or a recording's at the moment of its player. */
  get state(): State {
    return player.isRecorded ? player.state : this.now.state;
  }

  get hasState(): boolean {
    return player.isRecorded || this.now.has_state;
  }

  /** Whether silence means that something is wrong: a job is running. */
  expectsNews(): boolean {
    return Object.values(this.now.state.jobs).some((job) => job.phase === "training");
  }
}

export const feed = new Feed();
