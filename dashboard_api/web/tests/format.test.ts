import { describe, expect, test } from "vitest";
import { bitsPerS, bytes, count, duration, elapsed, metric, money, pace, percent, ratio, share, shortId, sum, withNames } from "../src/lib/format";
import { purposeText } from "../src/lib/purposes";

describe("figures", () => {
  test.each([
    [0, "0 B"],
    [999, "999 B"],
    [31_512, "31.5 kB"],
    [999_600, "1.00 MB"],
    [1_435_722, "1.44 MB"],
    [null, "–"],
    [NaN, "–"],
  ])("bytes of %s are %s", (value, text) => expect(bytes(value)).toBe(text));

  test("rates have the units of lines", () => {
    expect(bitsPerS(863_400)).toBe("863 kbit/s");
    expect(bitsPerS(47_108_092)).toBe("47.1 Mbit/s");
  });

  test.each([
    [0, "0 ms"],
    [0.25, "0.25 ms"],
    [412.4, "412 ms"],
    [2044, "2.0 s"],
    [99_960, "1 min 40 s"],
    [3_600_000, "1 h"],
    [93_784_000, "1 d 2 h"],
  ])("%s ms are %s", (ms, text) => expect(duration(ms)).toBe(text));

  test("time since the start is a clock", () => {
    expect(elapsed(67_900)).toBe("1:07");
    expect(elapsed(3_723_000)).toBe("1:02:03");
  });

  test("accuracies are shares, other metrics numbers", () => {
    expect(metric("accuracy", 0.9775)).toBe("97.8 %");
    expect(metric("perplexity", 12.3456)).toBe("12.346");
  });

  test("counts and ratios keep three digits", () => {
    expect([count(9280), pace(1720.6), pace(1.234), ratio(27.39), ratio(1182), percent(0.027)]).toEqual(["9.28 k", "1,721", "1.23", "27×", "1,182×", "2.7 %"]);
  });
});

describe("money", () => {
  test("is exact", () => {
    expect(money("65491136", 6)).toBe("65.491136");
    expect(money("1000000000000000000000001", 18)).toBe("1,000,000.000000000000000001");
    expect(money("39680000", 6)).toBe("39.68");
    expect(money("400000000", 6)).toBe("400.00");
    expect(money("5", 0)).toBe("5");
  });

  test("may be cut to some decimals, and is no number where nothing is known", () => {
    expect(money("65491136", 6, 2)).toBe("65.49");
    expect([money("", 6), money(null, 6), money("1e5", 6)]).toEqual(["–", "–", "–"]);
  });

  test("adds up beyond what a float holds", () => {
    expect(sum(["9007199254740993", "1", ""])).toBe("9007199254740994");
    expect([share("80", "400"), share("1", "0")]).toEqual([0.2, 0]);
  });
});

test("ids are short, purposes are words", () => {
  expect(shortId("0x3760b18fef4605d32a0d0416efacf1f52216ce8c")).toBe("0x3760…ce8c");
  expect(withNames("0x3760b18f... joined", { "0x3760b18fef4605d32a0d0416efacf1f52216ce8c": "attic" })).toBe("attic joined");
  expect(withNames("0x3760b18f... joined", {})).toBe("0x3760b18f... joined");
  expect(purposeText("batch/job-1/2")).toBe("records contributions of epoch 3");
  expect(purposeText("other/thing")).toBe("other/thing");
});
