import { describe, expect, test } from "vitest";
import { forecastLines, spread } from "../src/lib/estimate";
import { about, leftNow, type JobForecast } from "../src/lib/forecast";

const FORECAST: JobForecast = {
  left_ms: { low: 200_000, middle: 250_400, high: 400_000 },
  bytes_up: { low: 10_000, middle: 12_000, high: 20_000 },
  bytes_down: { low: 1_000_000, middle: 1_000_000, high: 1_000_000 },
  cost: null,
  escrow: "0",
  samples: 20_480,
  rounds: 38,
  nodes: 5,
  measured_nodes: 3,
  reason: "3 of 5 nodes are measured, 2 by the median",
};

describe("a forecast", () => {
  test("has a middle and a range, unless both are the same", () => {
    expect(spread(FORECAST.left_ms, about)).toBe("4 min 10 s (3 min 20 s to 6 min 40 s)");
    expect(spread(FORECAST.bytes_down, String)).toBe("1000000");
  });

  test("says its cost only where the job pays", () => {
    expect(forecastLines(FORECAST).map(([name]) => name)).toEqual(["Time", "Traffic up", "Traffic down", "Work", "Based on"]);
    const paid = { ...FORECAST, cost: { low: "9", middle: "10", high: "12" }, escrow: "20" };
    expect(forecastLines(paid)).toContainEqual(["Cost", "10 (9 to 12) of an escrow of 20"]);
  });

  test("runs down between two answers and not below nothing", () => {
    expect(leftNow(FORECAST, 210_000)).toEqual({ low: 0, middle: 40_400, high: 190_000 });
  });
});
