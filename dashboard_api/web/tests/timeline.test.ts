import { describe, expect, test } from "vitest";
import { cellAt, HEAD_PX, laneOrder, rowPx } from "../src/charts/timeline";
import { arrivedAt, jobAt, sortedRounds } from "../src/lib/job_at";
import { curves } from "../src/lib/progress";
import { moments } from "../src/lib/recording";
import { keepInside, timeTicks, toPixel, toValue } from "../src/lib/scale";
import { forecastText, laneSentence, quorumAt } from "../src/lib/sentences";
import { columned, recordedHistory } from "../src/lib/series";
import { sortedBy } from "../src/lib/sorting";
import type { Frame } from "../src/lib/frames";
import type { Job } from "../src/lib/types";
import { followingSpan, usualRoundMs, zoomedSpan } from "../src/lib/window";
import recorded from "../fixtures/demo.json";

const all = moments(recorded as unknown as [number, Frame][]);
const job = Object.values(all.at(-1)?.state.jobs ?? {}).find((each) => each.name === "demo") as Job;
const rounds = sortedRounds(job);

describe("scales", () => {
  const scale = { from: 1000, to: 3000, size: 400 };

  test("there and back is the same", () => {
    expect(toPixel(scale, 2000)).toBe(200);
    expect(toValue(scale, toPixel(scale, 1234))).toBeCloseTo(1234);
  });

  test("ticks are round, count from the origin and are few", () => {
    expect(timeTicks(1000, 3000, 500, 5)).toEqual([1000, 1500, 2000, 2500, 3000]);
    expect(timeTicks(0, 3_600_000, 0, 6)).toHaveLength(7);
  });

  test("a span keeps its size at an edge", () => {
    expect(keepInside(-5, 5, 0, 100)).toEqual([0, 10]);
    expect(keepInside(95, 105, 0, 100)).toEqual([90, 100]);
  });

  test("zooming holds the moment under the pointer", () => {
    const span = zoomedSpan({ from: 0, to: 100_000 }, 0.5, 25_000, { from: 0, to: 100_000 });
    expect(span).toEqual({ from: 12_500, to: 62_500 });
  });

  test("the usual round does not change with every round", () => {
    expect(usualRoundMs(rounds)).toBe(usualRoundMs(rounds.slice(0, -1)));
  });

  test("the followed span ends at the newest moment", () => {
    const now = (rounds.at(-1)?.ended_at_ms ?? 0) + 60_000;
    const span = followingSpan(rounds, now, 900, 1);
    expect(span.to).toBeLessThan(now);
    expect(span.to).toBeGreaterThan(rounds.at(-1)?.ended_at_ms ?? 0);
  });
});

describe("the timeline", () => {
  test("has a lane for each node, by slot", () => {
    expect(laneOrder(rounds)).toHaveLength(5);
    expect([rowPx(5), rowPx(20), rowPx(60)]).toEqual([30, 18, 12]);
  });

  test("finds the node and the round under the pointer", () => {
    const round = rounds[2];
    const order = laneOrder(rounds);
    const at = (round?.started_at_ms ?? 0) + 10;
    const drawing = { scale: { from: 0, to: 1, size: 1 }, rounds, order, row_px: 30, origin_ms: 0, now_ms: at, is_moving: false };
    expect(cellAt(drawing, at, HEAD_PX + 31)).toEqual({ node: order[1], round: 2 });
    expect(cellAt(drawing, at, 3)).toBeNull();
  });

  test("tells a lane in one sentence", () => {
    const round = rounds[3];
    const [node, lane] = Object.entries(round?.lanes ?? {})[0] ?? [];
    expect(round && lane && laneSentence(node ?? "", lane, round, 0)).toMatch(/round 4: accepted.*train .* forecast .* ± .* took .* Plan: (low|normal|high)/);
    expect(round && lane && forecastText({ ...lane, forecast_ms: null }, round)).toMatch(/nothing was known/);
  });

  test("the quorum is there when enough updates are in", () => {
    const round = rounds[0];
    const times = Object.values(round?.lanes ?? {}).map((lane) => arrivedAt(lane) ?? 0).sort((a, b) => a - b);
    expect(round && quorumAt(round)).toBe(times[2]);
  });
});

describe("a job at a moment", () => {
  test("before its first round has none", () => {
    expect(sortedRounds(jobAt(job, job.created_at_ms + 1))).toHaveLength(0);
  });

  test("in a round knows the updates that are in, and no others", () => {
    const round = rounds[4];
    const lanes = Object.entries(round?.lanes ?? {}).sort((a, b) => (arrivedAt(a[1]) ?? 0) - (arrivedAt(b[1]) ?? 0));
    const at = arrivedAt(lanes[1]![1]) ?? 0;
    const then = jobAt(job, at).rounds_by_number["4"];
    expect(lanes.map(([node]) => then?.lanes[node]?.result)).toEqual(["accepted", "accepted", "pending", "pending", "pending"]);
    expect([then?.ended_at_ms, then?.loss]).toEqual([null, null]);
  });

  test("at its end is the job", () => {
    const then = jobAt(job, job.ended_at_ms ?? 0);
    expect([then.phase, then.metric, then.rounds_by_number]).toEqual([job.phase, job.metric, job.rounds_by_number]);
  });

  test("is paused while it was paused", () => {
    const paused = job.events.find((each) => each.kind === "JobPaused");
    expect(jobAt(job, (paused?.at_ms ?? 0) + 1000).phase).toBe("paused");
  });
});

describe("curves and histories", () => {
  test("a job's curve grows along time and along bytes", () => {
    for (const axis of ["time", "bytes"] as const) {
      const { x } = curves(job, axis);
      expect(x).toEqual([...x].sort((a, b) => a - b));
      expect(x).toHaveLength(rounds.length);
    }
  });

  test("a recorded history has a value for each change, and columns keep a reading until the next", () => {
    const node = Object.keys(all.at(-1)?.state.nodes ?? {})[0] ?? "";
    const history = recordedHistory(all, node, ["rtt_us"], Infinity);
    expect(history.x.length).toBeGreaterThan(10);
    const cells = columned(history, "rtt_us", history.x[0] ?? 0, history.x.at(-1) ?? 0, 20);
    expect(cells.slice(cells.findIndex((each) => each !== null), cells.findLastIndex((each) => each !== null)).every((each) => each !== null)).toBe(true);
  });

  test("rows without a value come last in both directions", () => {
    const rows = [{ v: null }, { v: 2 }, { v: 10 }];
    expect(sortedBy(rows, (row) => row.v, 1).map((row) => row.v)).toEqual([2, 10, null]);
    expect(sortedBy(rows, (row) => row.v, -1).map((row) => row.v)).toEqual([10, 2, null]);
  });
});
