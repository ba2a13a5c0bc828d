import { expect, test } from "vitest";
import { curves, furtherMetrics } from "../src/lib/progress";
import type { Job, Round } from "../src/lib/types";

const round = (number: number, values: Partial<Round>): Round =>
  ({ number, started_at_ms: number * 10, ended_at_ms: number * 10 + 5, bytes_up: 1, bytes_down: 1, loss: 1, metric: null, samples_per_s: null, forecast_error: null, ...values }) as unknown as Round;
const job = {
  created_at_ms: 0,
  initial: { loss: 2.3, metric: 0.1, metrics: { f1: 0.05 }, samples: 100, samples_all: 100 },
  rounds_by_number: { 0: round(0, {}), 1: round(1, { metric: 0.8, held_out_loss: 0.5, metrics: { f1: 0.7, recall: 0.9 } }) },
} as unknown as Job;

test("the held-out loss and further metrics have curves, from the model before training on", () => {
  const all = curves(job, "time");
  expect(all.x).toEqual([0, 5, 15]);
  expect(all.metric).toEqual([0.1, null, 0.8]);
  expect(all.held_out_loss).toEqual([2.3, null, 0.5]);
  expect(all.loss).toEqual([null, 1, 1]);
  expect(all.further).toEqual({ f1: [0.05, null, 0.7], recall: [null, null, 0.9] });
  expect(furtherMetrics(job)).toEqual(["f1", "recall"]);
});

test("a recording from before there were any has the curves that it had", () => {
  const old = { ...job, initial: undefined, rounds_by_number: { 0: round(0, { metric: 0.4 }) } } as unknown as Job;
  const all = curves(old, "time");
  expect([all.x, all.metric, all.held_out_loss, all.further]).toEqual([[5], [0.4], [null], {}]);
});
