// What the feed has let go of, of one job: its course once it is opened, and rounds when they are looked at.
import { explained, type Failure } from "../lib/api";
import { fetchedCourse, fetchedRounds, type Course } from "../lib/course";
import type { Round } from "../lib/types";

const CHUNK = 50;
const CHUNKS_MOST = 12;
/** More rounds than this at once are too narrow to tell anything. */
export const ROUNDS_SHOWN_MOST = 400;
/** The course is fetched again when so many rounds more have left the feed. */
const STEP = 20;

export class OlderRounds {
  course = $state.raw<Course | null>(null);
  rounds = $state.raw<Record<string, Round>>({});
  failure = $state.raw<Failure | null>(null);
  #until = -Infinity;
  #chunks = new Set<number>();

  constructor(readonly job: string) {}

  /** Fetches the course, further metrics among it, when the feed's oldest round is `oldest`. */
  openCourse(oldest: number, metrics: readonly string[]): void {
    if (oldest < this.#until + STEP && oldest >= this.#until) return;
    this.#until = oldest;
    fetchedCourse(this.job, metrics).then(
      (course) => {
        this.course = course;
        this.failure = null;
      },
      (thrown: unknown) => {
        this.failure = explained(thrown);
        this.#until = -Infinity;
      },
    );
  }

  /** Fetches rounds that are not here, of a stretch that is not too long to be drawn. */
  openRounds(first: number, last: number): void {
    if (last - first >= ROUNDS_SHOWN_MOST) return;
    for (let chunk = Math.floor(first / CHUNK); chunk <= Math.floor(last / CHUNK); chunk += 1) if (!this.#chunks.has(chunk)) this.#open(chunk);
  }

  #open(chunk: number): void {
    this.#chunks.add(chunk);
    fetchedRounds(this.job, chunk * CHUNK, (chunk + 1) * CHUNK - 1).then(
      (rounds) => {
        this.#forget(chunk);
        this.rounds = { ...this.rounds, ...Object.fromEntries(rounds.map((each) => [each.number, each])) };
        this.failure = null;
      },
      (thrown: unknown) => {
        this.failure = explained(thrown);
        this.#chunks.delete(chunk);
      },
    );
  }

  /** Lets go of the chunks that were fetched first. */
  #forget(newest: number): void {
    while (this.#chunks.size > CHUNKS_MOST) {
      const oldest = [...this.#chunks].find((each) => each !== newest);
      if (oldest === undefined) return;
      this.#chunks.delete(oldest);
      this.rounds = Object.fromEntries(Object.entries(this.rounds).filter(([number]) => Math.floor(Number(number) / CHUNK) !== oldest));
    }
  }
}
