// What nodes did and earned, over all jobs or by job.
import { sum } from "./format";
import { sortedRounds } from "./job_at";
import type { Job, Lane, Node, Rejection, Round } from "./types";

export interface Work {
  samples: number;
  compute_ms: number;
  earned: string;
  paid: string;
}

export interface RoundPart {
  job: Job;
  round: Round;
  lane: Lane;
}

/** Accepted and measured work of these nodes in a job, with its pay. */
export function workIn(job: Job, nodes: readonly Node[]): Work {
  const ids = nodes.map((node) => node.id);
  const work = ids.map((id) => job.work?.[id] ?? { samples: 0, compute_ms: 0 });
  const pay = ids.map((id) => job.payments?.nodes[id]);
  return {
    samples: work.reduce((total, each) => total + each.samples, 0),
    compute_ms: work.reduce((total, each) => total + each.compute_ms, 0),
    earned: sum(pay.map((each) => each?.worth ?? "0")),
    paid: sum(pay.map((each) => each?.paid ?? "0")),
  };
}

export function totalWork(jobs: readonly Job[], nodes: readonly Node[]): Work {
  const all = jobs.map((job) => workIn(job, nodes));
  return {
    samples: all.reduce((total, each) => total + each.samples, 0),
    compute_ms: all.reduce((total, each) => total + each.compute_ms, 0),
    earned: sum(all.map((each) => each.earned)),
    paid: sum(all.map((each) => each.paid)),
  };
}

/** Jobs in which one of the nodes did something, newest first. */
export function jobsOf(jobs: readonly Job[], nodes: readonly Node[]): Job[] {
  return jobs
    .filter((job) => nodes.some(({ id }) => job.work?.[id] || job.payments?.nodes[id] || job.levels[id] || Object.values(job.rounds_by_number).some((round) => round.lanes[id])))
    .sort((a, b) => b.created_at_ms - a.created_at_ms);
}

export interface RoundRun {
  /** The newest of them. */
  part: RoundPart;
  /** Number of the oldest. */
  from: number;
}

/** Rounds one after another in which a node rested for one reason become one line. */
export function foldedRests(parts: readonly RoundPart[]): RoundRun[] {
  const runs: RoundRun[] = [];
  for (const part of parts) {
    const last = runs.at(-1);
    const isSame = last?.part.lane.result === "resting" && part.lane.result === "resting" && last.part.lane.reason === part.lane.reason;
    if (last && isSame && last.part.job.id === part.job.id) last.from = part.round.number;
    else runs.push({ part, from: part.round.number });
  }
  return runs;
}

export interface RejectionGroup {
  reason: string;
  count: number;
  newest: Rejection;
}

/** Rejections by their reason, in which jobs have their names; the newest reason first. */
export function rejectionGroups(nodes: readonly Node[], jobs: Readonly<Record<string, Job>>): RejectionGroup[] {
  const groups = new Map<string, RejectionGroup>();
  const all = nodes.flatMap((node) => node.rejections).sort((a, b) => b.at_ms - a.at_ms);
  for (const each of all) {
    const reason = each.reason.replaceAll(each.job, jobs[each.job]?.name || each.job);
    const known = groups.get(reason);
    if (known) known.count += 1;
    else groups.set(reason, { reason, count: 1, newest: each });
  }
  return [...groups.values()];
}

/** The newest rounds that a node had a part in. */
export function newestRounds(jobs: readonly Job[], node: Node, most: number): RoundPart[] {
  return jobs
    .flatMap((job) => sortedRounds(job).flatMap((round) => (round.lanes[node.id] ? [{ job, round, lane: round.lanes[node.id]! }] : [])))
    .sort((a, b) => b.round.started_at_ms - a.round.started_at_ms)
    .slice(0, most);
}

const CAPS: [string, string, (value: number) => string][] = [
  ["worker_threads", "Threads", String],
  ["worker_memory_bytes", "Memory", (value) => `${(value / 1e9).toFixed(1)} GB`],
  ["cache_bytes", "Downloads kept", (value) => `${(value / 1e9).toFixed(1)} GB`],
  ["step_floor_ms", "Least time of a step", (value) => `${value} ms`],
];

/** The owner's limits in words; those that are not set are left out. */
export function capRows(caps: Record<string, number> | null): [string, string][] {
  return CAPS.filter(([name]) => caps?.[name]).map(([name, text, words]) => [text, words(caps?.[name] ?? 0)]);
}
