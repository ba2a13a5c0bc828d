import { describe, expect, it } from "vitest";
import { placedLabels, type Point } from "../src/lib/labels";

const MIDDLE = 220;

/** Nodes on a ring, as the map draws them. */
function ring(count: number, radius: number): Point[] {
  return Array.from({ length: count }, (_, place) => {
    const angle = (place / count) * 2 * Math.PI - Math.PI / 2;
    return { x: MIDDLE + radius * Math.cos(angle), y: MIDDLE + radius * Math.sin(angle), text: `node-${String(place).padStart(2, "0")}`, rank: place };
  });
}

function boxes(points: readonly Point[]): [number, number, number, number][] {
  return placedLabels(points, MIDDLE).flatMap((label, place) => {
    if (!label) return [];
    const width = (points[place]?.text.length ?? 0) * 7.2;
    const left = label.anchor === "start" ? label.x : label.anchor === "end" ? label.x - width : label.x - width / 2;
    return [[left, label.y - 11, left + width, label.y + 4] as [number, number, number, number]];
  });
}

describe("names on the map", () => {
  it.each([2, 5, 16, 40, 200])("of %i nodes never cover each other", (count) => {
    for (const radius of [60, 100, 168]) {
      const found = boxes(ring(count, radius));
      found.forEach((a, place) => {
        for (const b of found.slice(place + 1)) expect(a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]).toBe(false);
      });
    }
  });

  it("of a few nodes are all there, also where two lie close to each other", () => {
    const [first, second] = [{ x: 300, y: 220, text: "attic", rank: 0 }, { x: 302, y: 226, text: "cellar", rank: 0 }];
    expect(placedLabels(ring(8, 168), MIDDLE).every((each) => each !== null)).toBe(true);
    expect(placedLabels([first, second], MIDDLE).every((each) => each !== null)).toBe(true);
  });

  it("are left out for the nodes of the lowest rank first", () => {
    const crowd = Array.from({ length: 12 }, (_, rank) => ({ x: 300, y: 220 + rank, text: "a-long-name", rank }));
    const labels = placedLabels(crowd, MIDDLE);
    expect(labels.at(-1)).not.toBeNull();
    expect(labels[0]).toBeNull();
  });
});
