import { describe, expect, test } from "vitest";
import { healthText, partsText } from "../src/lib/columns";
import type { Node } from "../src/lib/types";

const node = (values: Partial<Node>) => values as Node;

describe("a node's health", () => {
  test("is a number with its word", () => {
    expect(healthText(node({ health: "high", health_value: 0.834 }))).toBe("0.83 high");
  });
  test("of a recording from before there were numbers is the word alone", () => {
    expect(healthText(node({ health: "low" }))).toBe("low");
    expect(healthText(node({ health: null }))).toBe("–");
    expect(partsText(node({ health: "low" }))).toBe("");
  });
  test("is told by its parts", () => {
    const parts = { speed: 0.5, reliability: 1, quality: 0.75, uptime: 0.9 };
    expect(partsText(node({ health_parts: parts }))).toBe("speed 0.50, reliability 1.00, quality 0.75, uptime 0.90");
  });
});
