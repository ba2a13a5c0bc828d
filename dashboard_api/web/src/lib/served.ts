// Served models: those of a training, and the ring of one that nodes hold in stages.
import { hasEnded } from "./tones";
import type { Job, Node } from "./types";

export interface Stage {
  node: string;
  first_layer: number;
  end_layer: number;
  is_ready: boolean;
  layer_us: number;
  /** The ring that it is of, from 0 on, where a training has several. */
  ring: number;
}

export interface Served {
  open_calls: number;
  waiting_calls: number;
  tokens_per_s: number;
  stages: Stage[];
}

/** Models of a training that are served now, the newest version first. */
export function servedModels(jobs: Record<string, Job>, training: string): Job[] {
  return Object.values(jobs)
    .filter((job) => job.training === training && !hasEnded(job.phase))
    .sort((one, other) => other.round - one.round);
}

/** Whether rings train the model before it answers. */
export function isTrainedFirst(job: Job): boolean {
  return job.round < job.rounds;
}

/** Stages of each ring, ring after ring. */
export function stagesByRing(stages: Stage[]): Stage[][] {
  const numbers = [...new Set(stages.map((stage) => stage.ring))].sort((one, other) => one - other);
  return numbers.map((ring) => stages.filter((stage) => stage.ring === ring));
}

export interface RingPlace extends Stage {
  name: string;
  /** Where its middle lies, the ring's middle being 0 and its radius 1. */
  x: number;
  y: number;
  /** Time of a token in its layers; null: not measured. */
  compute_ms: number | null;
  /** Time to its node and back; null: not measured. */
  trip_ms: number | null;
}

/** Stages around a circle, clockwise behind the coordinator at the top. */
export function ringPlaces(stages: Stage[], nodes: Record<string, Node>): RingPlace[] {
  return stages.map((stage, place) => {
    const angle = (2 * Math.PI * (place + 1)) / (stages.length + 1);
    const node = nodes[stage.node];
    return {
      ...stage,
      name: node?.name || stage.node.slice(0, 10),
      x: Math.sin(angle),
      y: -Math.cos(angle),
      compute_ms: stage.layer_us > 0 ? (stage.layer_us * (stage.end_layer - stage.first_layer)) / 1000 : null,
      trip_ms: node?.rtt_us == null ? null : node.rtt_us / 1000,
    };
  });
}

/** Least time of a token around the ring; null: a part of it is not measured. */
export function tokenMs(places: RingPlace[]): number | null {
  let total = 0;
  for (const place of places) {
    if (place.compute_ms === null || place.trip_ms === null) return null;
    total += place.compute_ms + place.trip_ms;
  }
  return places.length > 0 ? total : null;
}
