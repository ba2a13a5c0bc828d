import { describe, expect, test } from "vitest";
import { band, commonTarget, joined, reachedAt, type Curve } from "../src/lib/compare";
import { FIELDS, dataMeaning, flat, likeBefore, offered, settingsTree, type Workload } from "../src/lib/settings";

const curve = (name: string, ...points: [number, number, number][]): Curve => ({
  name,
  points: points.map(([time_ms, bytes, metric]) => ({ time_ms, bytes, metric })),
});
const quick = curve("quick", [1000, 10, 0.5], [2000, 20, 0.9]);
const slow = curve("slow", [4000, 100, 0.4], [8000, 300, 0.95]);

const workload = (name: string, takes_data: string): Workload => ({ name, takes_data, meaning: "", dataset: "", kind: "torch", metric: "accuracy", options: [] });

describe("comparisons", () => {
  test("a target is reached on the line between two evaluations", () => {
    expect(reachedAt(quick, "time", 0.7)).toBeCloseTo(1500);
    expect(reachedAt(quick, "bytes", 0.7)).toBeCloseTo(15);
    expect(reachedAt(quick, "time", 0.99)).toBeNull();
  });

  test("a metric that falls is reached from above", () => {
    const loss: Curve = { name: "loss", points: [{ time_ms: 0, bytes: 0, metric: 4 }, { time_ms: 1000, bytes: 10, metric: 2 }, { time_ms: 2000, bytes: 20, metric: 1 }] };
    expect(reachedAt(loss, "time", 1.5)).toBeCloseTo(1500);
    expect(reachedAt(loss, "time", 0.5)).toBeNull();
    expect(commonTarget([loss])).toBeCloseTo(1);
  });

  test("the proposed target is one that two curves reach", () => {
    expect(commonTarget([quick, slow, curve("never", [1, 1, 0.1])])).toBe(0.9);
  });

  test("curves lie on the union of their places", () => {
    const { x, rows } = joined([quick, slow], "time");
    expect(x).toEqual([1000, 2000, 4000, 8000]);
    expect(rows[0]).toEqual([0.5, 0.9, null, null]);
  });

  test("a band has the least, the median and the most of the seeds", () => {
    const seeds = [0.1, 0.2, 0.4].map((rise, seed) => curve(String(seed), [0, 0, 0], [10, 10, rise]));
    const { least, middle, most } = band(seeds, "time", [5]);
    expect([least, middle, most]).toEqual([[0.05], [0.1], [0.2]]);
  });

  test("a seed that has ended keeps its last value until all have ended", () => {
    const { least, most } = band([quick, slow], "time", [1000, 4000, 8000, 9000]);
    expect(least).toEqual([0.5, 0.4, 0.9, null]);
    expect(most).toEqual([0.5, 0.9, 0.95, null]);
  });
});

describe("settings of a new job", () => {
  test("are a tree without what is the default", () => {
    const tree = settingsTree("digits-cnn", FIELDS, { name: "", "training.nodes": 5, "training.rounds": 40, strategy: "aware" }, { channels: 48 });
    expect(tree).toEqual({ workload: "digits-cnn", strategy: "aware", training: { nodes: 5 }, options: { channels: 48 } });
  });

  test("offer no program, which comes with its data by hypergpu.train", () => {
    expect(offered([workload("program", "required"), workload("digits-cnn", "never")]).map((each) => each.name)).toEqual(["digits-cnn"]);
  });

  test("say what the archive of an adapter's data holds", () => {
    expect(dataMeaning(workload("hf-causal-lm", "required"))).toContain("base/");
    expect(dataMeaning(workload("hf-image-classifier", "required"))).toContain("images/");
    expect(dataMeaning(workload("imagefolder-vgg11", "required"))).toBe("this workload has no data of its own");
    expect(dataMeaning(workload("text-gpt", "optional"))).toContain("the workload's own data");
  });

  test("are listed by dotted key", () => {
    expect(flat({ a: { b: 1, c: [2] }, d: "x" })).toEqual([["a.b", 1], ["a.c", [2]], ["d", "x"]]);
  });

  test("a new value is of the kind of the old one", () => {
    expect([likeBefore("0.01", 1), likeBefore("true", false), likeBefore("int4", "fp32"), likeBefore("x", 1)]).toEqual([0.01, true, "int4", "x"]);
  });
});
