// Places of names beside their points, so that none covers another or a point.

export interface Point {
  x: number;
  y: number;
  text: string;
  /** Points of a higher rank get their place first. */
  rank: number;
}

export interface Label {
  x: number;
  y: number;
  anchor: "start" | "middle" | "end";
}

interface Box {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

const HEIGHT = 15;
const GAP = 12;
const CHARACTER = 7.2;
const RADIUS = 8;

const overlaps = (a: Box, b: Box): boolean => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

function boxOf(label: Label, text: string): Box {
  const width = text.length * CHARACTER;
  const left = label.anchor === "start" ? label.x : label.anchor === "end" ? label.x - width : label.x - width / 2;
  return { left, right: left + width, top: label.y - HEIGHT + 4, bottom: label.y + 4 };
}

/** Beside, above and below a point; first the side that looks away from the middle. */
function candidates(point: Point, middle: number): Label[] {
  const right: Label = { x: point.x + GAP, y: point.y + 4, anchor: "start" };
  const left: Label = { x: point.x - GAP, y: point.y + 4, anchor: "end" };
  const above: Label = { x: point.x, y: point.y - GAP - 1, anchor: "middle" };
  const below: Label = { x: point.x, y: point.y + GAP + 9, anchor: "middle" };
  const sides = point.x < middle ? [left, right] : [right, left];
  const heights = point.y < middle ? [above, below] : [below, above];
  return Math.abs(point.x - middle) < 30 ? [...heights, ...sides] : [...sides, ...heights];
}

/** A place for each name in the order of the points; null: none is free, so the name is left out. */
export function placedLabels(points: readonly Point[], middle: number, taken: readonly Box[] = []): (Label | null)[] {
  const boxes: Box[] = [...taken, ...points.map(({ x, y }) => ({ left: x - RADIUS, right: x + RADIUS, top: y - RADIUS, bottom: y + RADIUS }))];
  const labels: (Label | null)[] = points.map(() => null);
  const order = points.map((_, place) => place).sort((a, b) => (points[b]?.rank ?? 0) - (points[a]?.rank ?? 0) || a - b);
  for (const place of order) {
    const point = points[place];
    if (!point) continue;
    for (const label of candidates(point, middle)) {
      const box = boxOf(label, point.text);
      if (boxes.some((other) => overlaps(box, other))) continue;
      boxes.push(box);
      labels[place] = label;
      break;
    }
  }
  return labels;
}
