// Settings of a new job: a form's fields as the tree that the server checks.
import type { Json } from "./types";

export interface WorkloadOption {
  name: string;
  default: string | number | boolean;
  meaning: string;
  minimum: number | null;
  maximum: number | null;
}

export interface Workload {
  name: string;
  meaning: string;
  dataset: string;
  kind: string;
  metric: string;
  takes_data: string;
  options: WorkloadOption[];
}

/** The workloads that a form can begin: a program comes by `hypergpu.train`, with its data. */
export function offered(workloads: readonly Workload[]): Workload[] {
  return workloads.filter((each) => each.name !== "program");
}

/** What the archive of a workload's data has to hold. */
export function dataMeaning(workload: Workload): string {
  if (workload.name.startsWith("hf-")) {
    const rows = workload.name === "hf-image-classifier" ? "images/" : "rows in .jsonl, .parquet, .json, .csv or text files";
    return `with base/, a model as save_pretrained writes it, and ${rows}`;
  }
  return workload.takes_data === "required" ? "this workload has no data of its own" : "without it the workload's own data is used";
}

export interface Field {
  /** Dotted key of the job file. */
  key: string;
  name: string;
  meaning: string;
  value: string | number | boolean;
  choices?: string[];
  least?: number;
  step?: number;
}

export const STRATEGIES = ["aware", "diloco", "fedavg", "sync"];

export const FIELDS: Field[] = [
  { key: "name", name: "Name", meaning: "For people", value: "" },
  { key: "strategy", name: "Strategy", meaning: "aware plans each node and round; the others use fixed steps", value: "aware", choices: STRATEGIES },
  { key: "training.nodes", name: "Nodes", meaning: "The job starts when so many are there", value: 1, least: 1 },
  { key: "training.rounds", name: "Rounds", meaning: "Amount of training", value: 40, least: 1 },
  { key: "training.inner_steps", name: "Inner steps", meaning: "Steps of a node between updates; aware decides them itself", value: 20, least: 1 },
  { key: "training.batch_size", name: "Batch", meaning: "Samples in a step", value: 32, least: 1 },
  { key: "inner.learning_rate", name: "Learning rate", meaning: "Of the inner optimizer", value: 0.001, step: 0.0001 },
  { key: "evaluation.every", name: "Evaluate every", meaning: "Rounds between evaluations", value: 5, least: 1 },
  { key: "evaluation.target", name: "Target", meaning: "The job ends when the metric reaches it; 0: never before its end", value: 0, step: 0.01 },
  { key: "evaluation.target_mode", name: "Metric", meaning: "min: it falls to the target; max: it rises; name: as its name says", value: "name", choices: ["name", "min", "max"] },
  { key: "evaluation.samples", name: "Evaluated samples", meaning: "Held-out samples of an evaluation between the first and the last, always the same; 0: all", value: 10000, least: 0 },
  { key: "pay.unit_price", name: "Unit price", meaning: "Smallest units of the token for 100 samples of full quality; 0: no pay", value: 0, least: 0 },
];

type Tree = { [key: string]: Json };

/** A tree out of dotted keys; a value that is the default or empty is left out, but for the strategy: the one shown is the one asked for. */
export function settingsTree(workload: string, fields: readonly Field[], values: Readonly<Record<string, string | number | boolean>>, options: Readonly<Record<string, string | number | boolean>>): Tree {
  const tree: Tree = { workload };
  for (const field of fields) {
    const value = values[field.key] ?? field.value;
    if (value === "" || (value === field.value && field.key !== "strategy")) continue;
    place(tree, field.key.split("."), value);
  }
  if (Object.keys(options).length) tree["options"] = { ...options };
  return tree;
}

function place(tree: Tree, [first, ...rest]: string[], value: Json): void {
  if (first === undefined) return;
  if (rest.length === 0) {
    tree[first] = value;
    return;
  }
  const below = tree[first];
  const inside: Tree = typeof below === "object" && below !== null && !Array.isArray(below) ? below : {};
  tree[first] = inside;
  place(inside, rest, value);
}

/** Leaves of a tree by dotted key. */
export function flat(tree: Tree, beginning = ""): [string, Json][] {
  return Object.entries(tree).flatMap(([key, value]): [string, Json][] =>
    typeof value === "object" && value !== null && !Array.isArray(value) ? flat(value, `${beginning}${key}.`) : [[beginning + key, value]],
  );
}

/** A field's text as the kind of value that it replaces. */
export function likeBefore(text: string, before: Json): string | number | boolean {
  if (typeof before === "boolean") return text === "true";
  if (typeof before === "number" && text.trim() !== "" && Number.isFinite(Number(text))) return Number(text);
  return text;
}
