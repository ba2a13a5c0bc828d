// Plays a recording that came with the page.
import { moments, placeAt, type Moment } from "../lib/recording";
import { EMPTY, type Frame } from "../lib/frames";
import type { State } from "../lib/types";

const TICK_MS = 50;

class Player {
  all = $state.raw<Moment[]>([]);
  at_ms = $state(0);
  speed = $state(1);
  isPlaying = $state(false);
  #timer = 0;

  get isRecorded(): boolean {
    return this.all.length > 0;
  }

  get from_ms(): number {
    return this.all[0]?.at_ms ?? 0;
  }

  get to_ms(): number {
    return this.all.at(-1)?.at_ms ?? 0;
  }

  get state(): State {
    return this.all[placeAt(this.all, this.at_ms)]?.state ?? EMPTY;
  }

  load(frames: [number, Frame][]): void {
    this.all = moments(frames);
    this.at_ms = this.to_ms;
  }

  seek(at_ms: number): void {
    this.at_ms = Math.max(this.from_ms, Math.min(this.to_ms, at_ms));
  }

  play(): void {
    if (this.at_ms >= this.to_ms) this.at_ms = this.from_ms;
    this.isPlaying = true;
    let last = performance.now();
    window.clearInterval(this.#timer);
    this.#timer = window.setInterval(() => {
      const now = performance.now();
      this.seek(this.at_ms + (now - last) * this.speed);
      last = now;
      if (this.at_ms >= this.to_ms) this.pause();
    }, TICK_MS);
  }

  pause(): void {
    window.clearInterval(this.#timer);
    this.isPlaying = false;
  }
}

export const player = new Player();
