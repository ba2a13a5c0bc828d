import { describe, expect, test } from "vitest";
import { completionOf } from "../src/lib/completion";
import type { Job } from "../src/lib/types";

const training = { rounds: 20, inner_steps: 10, batch_size: 8, nodes: 2 };
const job = (given: object): Job => ({ phase: "training", round: 13, rounds: 20, samples: 800, spec: {}, ...given }) as unknown as Job;

describe("how far a job is", () => {
  test("stated rounds are counted", () => {
    const found = completionOf(job({ spec: { strategy: "diloco", training } }));
    expect(found).toEqual({ share: 0.65, text: "13 of 20" });
  });
  test("of planned rounds nobody knows how many there are: samples are counted", () => {
    const found = completionOf(job({ round: 25, spec: { strategy: "aware", training } }));
    expect(found).toEqual({ share: 0.25, text: "25, 25 %" });
  });
  test("the last round may exceed the rest", () => {
    expect(completionOf(job({ samples: 3_300, spec: { strategy: "aware", training } })).text).toBe("13, 100 %");
  });
});
