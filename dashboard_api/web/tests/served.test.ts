import { expect, test } from "vitest";
import { isTrainedFirst, ringPlaces, servedModels, stagesByRing, tokenMs } from "../src/lib/served";
import type { Job, Node } from "../src/lib/types";

const job = (id: string, round: number, training = "t", phase = "serving"): Job => ({ id, round, training, phase }) as Job;
const STAGES = [
  { node: "0xaaaaaaaaaaaa", first_layer: 0, end_layer: 4, is_ready: true, layer_us: 2500, ring: 0 },
  { node: "0xbbbbbbbbbbbb", first_layer: 4, end_layer: 6, is_ready: false, layer_us: 1000, ring: 0 },
  { node: "0xcccccccccccc", first_layer: 6, end_layer: 7, is_ready: true, layer_us: 0, ring: 0 },
];
const NODES = { "0xaaaaaaaaaaaa": { name: "attic", rtt_us: 8000 }, "0xbbbbbbbbbbbb": { name: "", rtt_us: 2000 } } as unknown as Record<string, Node>;

test("models of a training that are served are those of now, the newest first", () => {
  const jobs = { a: job("a", 0), b: job("b", 9), c: job("c", 4, "u"), d: job("d", 5, "t", "stopped") };
  expect(servedModels(jobs, "t").map((one) => one.id)).toEqual(["b", "a"]);
});

test("a model is trained first until all of its rounds are stored", () => {
  const rounds = [[0, 0], [0, 3], [2, 3], [3, 3]].map(([round, of]) => ({ ...job("a", round!), rounds: of! }));
  expect(rounds.map(isTrainedFirst)).toEqual([false, true, true, false]);
});

test("stages stand clockwise behind the coordinator at the top", () => {
  const [first, second, third] = ringPlaces(STAGES, NODES);
  expect(first).toMatchObject({ name: "attic", compute_ms: 10, trip_ms: 8 });
  expect(second).toMatchObject({ name: "0xbbbbbbbb", compute_ms: 2, trip_ms: 2 });
  expect(third).toMatchObject({ compute_ms: null, trip_ms: null });
  expect([first!.x, second!.y, third!.x].map(Math.round)).toEqual([1, 1, -1]);
});

test("each ring of a training has its own stages", () => {
  const second = STAGES.map((stage) => ({ ...stage, ring: 2 }));
  expect(stagesByRing([...second, ...STAGES])).toEqual([STAGES, second]);
  expect(stagesByRing([])).toEqual([]);
});

test("a token's least time is told where all of it was measured", () => {
  const places = ringPlaces(STAGES, NODES);
  expect(tokenMs(places.slice(0, 2))).toBe(22);
  expect(tokenMs(places)).toBeNull();
  expect(tokenMs([])).toBeNull();
});
