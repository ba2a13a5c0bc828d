// How far a job is: by rounds where they are stated, by samples where plans decide on rounds.
import type { Job, Json } from "./types";

export interface Completion {
  share: number;
  /** For a narrow place: `3 of 20`, or `13, 52 %`. */
  text: string;
  /** The same in words. */
  label: string;
}

const count = (tree: Json | undefined, name: string): number => {
  const value = tree && typeof tree === "object" && !Array.isArray(tree) ? tree[name] : undefined;
  return typeof value === "number" ? value : 0;
};

/** Samples that a planned job is to train on; 0: it has stated rounds, or its settings are not known. */
export function plannedSamples(job: Job): number {
  if (job.spec["strategy"] !== "aware") return 0;
  const training = job.spec["training"];
  return ["rounds", "inner_steps", "batch_size", "nodes"].reduce((product, name) => product * count(training, name), 1);
}

export function completionOf(job: Job): Completion {
  const planned = plannedSamples(job);
  if (planned) {
    const share = Math.min(1, job.samples / planned);
    const percent = `${Math.floor(100 * share)} %`;
    return { share, text: `${job.round}, ${percent}`, label: `${job.round} rounds, ${percent} of the samples` };
  }
  const rounds = job.phase === "finished" ? job.round : Math.max(job.rounds, job.round);
  return { share: rounds ? job.round / rounds : 0, text: `${job.round}${rounds > 999 ? "/" : " of "}${rounds}`, label: `${job.round} of ${rounds} rounds` };
}
