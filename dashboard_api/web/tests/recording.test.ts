import recorded from "../fixtures/demo.json";
import { describe, expect, test } from "vitest";
import { moments, placeAt } from "../src/lib/recording";
import type { Frame } from "../src/lib/frames";

const frames = recorded as unknown as [number, Frame][];

describe("a recording", () => {
  const all = moments(frames);

  test("tells the whole job at its end", () => {
    const job = Object.values(all.at(-1)?.state.jobs ?? {}).find((each) => each.name === "demo");
    expect(job?.phase).toBe("finished");
    expect(Object.keys(job?.rounds_by_number ?? {})).toHaveLength(job?.round ?? 0);
    expect(new Set(job?.events.map((each) => each.sequence)).size).toBe(job?.events.length);
  });

  test("has the newest moment that is not after the one asked for", () => {
    const at = all[10]?.at_ms ?? 0;
    expect(all[placeAt(all, at)]?.at_ms).toBeLessThanOrEqual(at);
    expect(placeAt(all, 0)).toBe(0);
    expect(placeAt(all, Infinity)).toBe(all.length - 1);
  });
});
