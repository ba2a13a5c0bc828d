// How far a job is: by rounds where they are stated, by samples where plans decide on rounds, by items where it has some; a served model goes on.
import type { Job } from "./types";

const FACTORS = ["rounds", "inner_steps", "batch_size", "nodes"];

/** The text is `3 of 20`, or `13, 52 %` where nobody knows how many rounds there will be. */
export function completionOf(job: Job): { share: number; text: string } {
  const { farm } = job;
  if (farm) return { share: farm.settled_items / farm.items, text: `${farm.settled_items} of ${farm.items}` };
  const { strategy, training } = job.spec as { strategy?: string; training?: Record<string, number> };
  const planned = strategy === "aware" && training ? FACTORS.reduce((product, name) => product * (training[name] ?? 0), 1) : 0;
  const rounds = job.phase === "finished" ? job.round : Math.max(job.rounds, job.round);
  const share = Math.min(1, planned ? job.samples / planned : job.round / (rounds || 1));
  return { share, text: planned ? `${job.round}, ${Math.floor(100 * share)} %` : rounds ? `${job.round}${rounds > 999 ? "/" : " of "}${rounds}` : "–" };
}
