import { describe, expect, test } from "vitest";
import { band, commonTarget, falls, joined, reachedAt, taskName, tasks, type Curve } from "../src/lib/compare";
import type { Job } from "../src/lib/types";
import { FIELDS, dataMeaning, flat, likeBefore, offered, settingsTree, type Workload } from "../src/lib/settings";

const curve = (name: string, ...points: [number, number, number][]): Curve => ({
  name,
  points: points.map(([time_ms, bytes, metric]) => ({ time_ms, bytes, metric })),
});
const quick = curve("quick", [1000, 10, 0.5], [2000, 20, 0.9]);
const slow = curve("slow", [4000, 100, 0.4], [8000, 300, 0.95]);

const workload = (name: string, takes_data: string): Workload => ({ name, takes_data, meaning: "", dataset: "", kind: "torch", metric: "accuracy", options: [] });

const job = (id: string, created_at_ms: number, spec: Record<string, unknown>, metric_name = "accuracy"): Job => ({ id, created_at_ms, spec, metric_name }) as unknown as Job;

describe("jobs of one task", () => {
  const digits = { workload: "digits-cnn", data: { name: "" }, options: {} };

  test("are compared with each other whatever their strategy, and with no others", () => {
    const all = [job("a", 1, { ...digits, strategy: "aware" }), job("b", 2, { ...digits, strategy: "diloco" }), job("c", 3, { workload: "digits-mlp" })];
    expect(tasks(all).map((each) => each.jobs.map((one) => one.id))).toEqual([["c"], ["a", "b"]]);
  });

  test("have the same data, options and metric", () => {
    const others = [{ ...digits, data: { name: "cats" } }, { ...digits, options: { width: 8 } }, { ...digits, model: { init: "a.safetensors" } }];
    const all = [job("a", 1, digits), ...others.map((spec, place) => job(String(place), 2, spec)), job("m", 3, digits, "mae")];
    expect(tasks(all)).toHaveLength(5);
  });

  test("are told by workload, data and metric", () => {
    expect(taskName([job("a", 1, { workload: "program", data: { name: "cats" } }, "f1")])).toBe("program on cats, f1 (1)");
  });
});

describe("comparisons", () => {
  test("a target is reached on the line between two evaluations", () => {
    expect(reachedAt(quick, "time", 0.7)).toBeCloseTo(1500);
    expect(reachedAt(quick, "bytes", 0.7)).toBeCloseTo(15);
    expect(reachedAt(quick, "time", 0.99)).toBeNull();
  });

  test("a falling metric reaches its target from above", () => {
    const falling = [curve("quick", [1000, 10, 3], [2000, 20, 1]), curve("slow", [4000, 100, 3], [8000, 300, 2])];
    expect(reachedAt(falling[0]!, "time", 2, true)).toBeCloseTo(1500);
    expect(reachedAt(falling[0]!, "time", 0.5, true)).toBeNull();
    expect(commonTarget(falling, true)).toBe(2);
    expect(falls(job("a", 1, {}, "mae"))).toBe(false);
    expect(falls({ ...job("a", 1, {}, "mae"), target_mode: "min" })).toBe(true);
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

  test("name the strategy that the form shows, touched or not", () => {
    expect(settingsTree("digits-cnn", FIELDS, {}, {})).toEqual({ workload: "digits-cnn", strategy: "aware" });
    expect(settingsTree("digits-cnn", FIELDS, { strategy: "diloco" }, {})).toEqual({ workload: "digits-cnn", strategy: "diloco" });
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
