import { describe, expect, it } from "vitest";
import { capRows, foldedRests, jobsOf, newestRounds, rejectionGroups, totalWork, workIn } from "../src/lib/own_work";
import type { Job, Lane, Node, Round } from "../src/lib/types";

const lane = (over: Partial<Lane>): Lane => ({ result: "accepted", reason: "", segments: [], ...over }) as Lane;
const round = (number: number, lanes: Record<string, Lane>): Round => ({ number, started_at_ms: number * 1000, lanes }) as Round;
const job = (id: string, over: Partial<Job>): Job =>
  ({ id, name: `${id} name`, created_at_ms: 0, levels: {}, payments: null, rounds_by_number: {}, ...over }) as Job;
const node = (id: string, over: Partial<Node> = {}): Node => ({ id, rejections: [], ...over }) as Node;
const pay = (worth: string, paid: string) => ({ receipts: 1, worth, paid, allotted: "0" });

describe("what a node did and earned", () => {
  const one = job("one", { work: { a: { samples: 10, compute_ms: 5 }, b: { samples: 1, compute_ms: 1 } }, payments: { nodes: { a: pay("70", "30") } } as unknown as Job["payments"] });
  const two = job("two", { created_at_ms: 9, work: { a: { samples: 2, compute_ms: 1 } } });

  it("is added up exactly, over jobs and nodes", () => {
    expect(workIn(one, [node("a"), node("b")])).toEqual({ samples: 11, compute_ms: 6, earned: "70", paid: "30" });
    expect(totalWork([one, two], [node("a")])).toEqual({ samples: 12, compute_ms: 6, earned: "70", paid: "30" });
  });

  it("names the jobs that it had a part in, newest first", () => {
    const rested = job("rested", { created_at_ms: 5, rounds_by_number: { "0": round(0, { a: lane({ result: "resting" }) }) } });
    expect(jobsOf([one, two, job("other", {}), rested], [node("a")]).map((each) => each.id)).toEqual(["two", "rested", "one"]);
  });
});

it("folds rounds in which a node rested for one reason into one line", () => {
  const rest = lane({ result: "resting", reason: "paused by its owner" });
  const rounds = { "0": round(0, { a: lane({}) }), "1": round(1, { a: rest }), "2": round(2, { a: rest }), "3": round(3, { b: rest }) };
  const runs = foldedRests(newestRounds([job("one", { rounds_by_number: rounds })], node("a"), 9));
  expect(runs.map((each) => [each.from, each.part.round.number])).toEqual([[1, 2], [0, 0]]);
});

it("groups rejections by their reason, with the name of the job", () => {
  const rejections = [1, 2].map((at_ms) => ({ at_ms, job: "one", round: at_ms, reason: "one is aggregating" }));
  const [group, ...others] = rejectionGroups([node("a", { rejections })], { one: job("one", {}) });
  expect(others).toEqual([]);
  expect(group).toMatchObject({ reason: "one name is aggregating", count: 2, newest: { round: 2 } });
});

it("states the limits that are set", () => {
  expect(capRows({ worker_threads: 2, worker_memory_bytes: 4e9 })).toEqual([["Threads", "2"], ["Memory", "4.0 GB"]]);
  expect(capRows(null)).toEqual([]);
});
