import { expect, test } from "vitest";
import { axesOf, curvePoints, itemsPerS, keysOf, leftMs, pointsOf, tilesOf, type ItemRow } from "../src/lib/farm";
import type { Farm } from "../src/lib/types";

const NODE = { bundles: 1, items: 5, units: 5, failures: 0, handed_back: 0, doubts: 0, items_per_s: null, at_ms: 1 };
const FARM: Farm = {
  item_kind: "embed",
  items: 23,
  unit: "items",
  settled_items: 13,
  credited_units: 13,
  failed_items: 0,
  units: 13,
  open_bundles: 1,
  tile_items: 5,
  settled_by_tile: { "0": 5, "1": 5, "2": 3 },
  doubted_by_tile: { "1": 1 },
  open_runs: [{ start: 14, items: 7 }],
  nodes: { a: { ...NODE, items_per_s: 4 }, b: { ...NODE, items_per_s: 1 }, c: NODE },
};

test("tiles are done, doubted, out or untouched, and the last one is shorter", () => {
  const tiles = tilesOf(FARM);
  expect(tiles.map((tile) => tile.state)).toEqual(["done", "doubted", "out", "out", "out"]);
  expect(tiles.at(-1)).toMatchObject({ first: 20, items: 3, settled: 0 });
  expect(tilesOf({ ...FARM, open_runs: [] }).map((tile) => tile.state)).toEqual(["done", "doubted", "part", "untouched", "untouched"]);
});

test("what is left takes the sum of the known speeds", () => {
  expect(itemsPerS(FARM)).toBe(5);
  expect(leftMs(FARM)).toBe(2000);
  expect(leftMs({ ...FARM, nodes: { c: NODE } })).toBeNull();
});

const ROWS: ItemRow[] = [
  { item: 0, node: "a", error: "", value: { point: { lr: 0.001, optimizer: "sgd" }, metric: 2, steps: 10, curve: [{ step: 0, value: 4 }, { step: 10, value: 2 }] } },
  { item: 1, node: "a", error: "", value: { point: { lr: 0.1, optimizer: "muon" }, metric: 1, steps: 10, curve: [{ step: 0, value: 4 }] } },
  { item: 2, node: "b", error: "it diverged", value: null },
];

test("a sweep's points are lines over axes, by logarithms where values are far apart", () => {
  const points = pointsOf([...ROWS, { item: 3, node: "b", error: "", value: { point: { lr: 0.01, optimizer: "sgd" }, metric: 1.5 } }]);
  expect(keysOf(points)).toEqual(["lr", "optimizer"]);
  const [lr, optimizer, metric] = axesOf(points, keysOf(points), "loss");
  expect(points.map((point) => lr?.at(point)?.toFixed(2) ?? null)).toEqual(["0.00", "1.00", null, "0.50"]);
  expect(optimizer?.ticks.map((tick) => tick.text)).toEqual(["sgd", "muon"]);
  expect(points.map((point) => metric?.at(point) ?? null)).toEqual([1, 0, null, 0.5]);
  expect(metric?.name).toBe("loss");
});

test("a curve fills its box and one value is none", () => {
  const [first, second] = pointsOf(ROWS);
  expect(curvePoints(first?.curve ?? [], 90, 20, 2, 4)).toBe("0.0,0.0 90.0,20.0");
  expect(curvePoints(second?.curve ?? [], 90, 20, 2, 4)).toBe("");
});
