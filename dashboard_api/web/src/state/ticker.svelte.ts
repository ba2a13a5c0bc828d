// The server's time for what grows while one looks: ten times a second, and only while the page is seen.
import { feed } from "./feed.svelte";

const TICK_MS = 100;

class Ticker {
  at_ms = $state(Date.now());

  start(): void {
    window.setInterval(() => {
      if (!document.hidden) this.at_ms = feed.clock() || Date.now();
    }, TICK_MS);
  }
}

export const ticker = new Ticker();
