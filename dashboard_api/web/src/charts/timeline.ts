// Draws the lanes of a job's rounds on a canvas. Times are Unix ms, lengths CSS pixels.
import { duration, elapsed } from "../lib/format";
import { arrivedAt } from "../lib/job_at";
import { timeTicks, toPixel, type Scale } from "../lib/scale";
import { quorumAt } from "../lib/sentences";
import type { Lane, LaneOutcome, NodePhase, Round, Segment } from "../lib/types";

export const HEAD_PX = 38;
const NAMES = ["download", "train", "encode", "upload", "wait", "pause", "rest", "text", "muted", "line", "surface", "raised", "bad", "good", "accent", "warn"] as const;
export type Palette = Record<(typeof NAMES)[number], string>;

export interface Drawing {
  canvas: HTMLCanvasElement;
  scale: Scale;
  rounds: readonly Round[];
  /** Nodes from top to bottom. */
  order: readonly string[];
  row_px: number;
  origin_ms: number;
  now_ms: number;
  /** Whether the newest round is open and the time is drawn. */
  is_moving: boolean;
  palette: Palette;
  cell: Cell | null;
}

export interface Cell {
  node: string;
  round: number;
}

export function readPalette(element: Element): Palette {
  const style = getComputedStyle(element);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()])) as Palette;
}

export function rowPx(lanes: number): number {
  if (lanes <= 8) return 30;
  if (lanes <= 16) return 24;
  return lanes <= 32 ? 18 : 12;
}

/** Nodes of these rounds, by slot. */
export function laneOrder(rounds: readonly Round[]): string[] {
  const slots = new Map<string, number>();
  for (const round of rounds) for (const [node, lane] of Object.entries(round.lanes)) if (!slots.has(node)) slots.set(node, lane.slot);
  return [...slots].sort((a, b) => a[1] - b[1]).map(([node]) => node);
}

export function endOf(round: Round, now_ms: number): number {
  return round.ended_at_ms ?? Math.max(now_ms, round.started_at_ms);
}

/** The cell at a point, where there is one. */
export function cellAt(drawing: Omit<Drawing, "canvas" | "palette" | "cell">, at_ms: number, y: number): Cell | null {
  const node = drawing.order[Math.floor((y - HEAD_PX) / drawing.row_px)];
  const round = drawing.rounds.findLast((each) => each.started_at_ms <= at_ms);
  if (y < HEAD_PX || !node || !round || !round.lanes[node]) return null;
  return at_ms <= Math.max(endOf(round, drawing.now_ms), round.deadline_at_ms ?? 0) ? { node, round: round.number } : null;
}

type Box = [x: number, y: number, width: number, height: number];
type Fill = string | CanvasPattern;

const HATCH_PX = 6;
/** Pixels of the tile to a CSS pixel: sharp on dense screens, too. */
const HATCH_SCALE = 2;
const hatches = new Map<string, CanvasPattern | null>();

/** A colour with oblique stripes, made once: single lines would be thousands in each frame. */
function hatched(context: CanvasRenderingContext2D, colour: string, stripe: string, lean: number): CanvasPattern | null {
  const key = `${colour} ${stripe} ${lean}`;
  const known = hatches.get(key);
  if (known !== undefined) return known;
  const size = HATCH_PX * HATCH_SCALE;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const drawing = tile.getContext("2d") as CanvasRenderingContext2D;
  drawing.fillStyle = colour;
  drawing.fillRect(0, 0, size, size);
  drawing.strokeStyle = stripe;
  drawing.globalAlpha = 0.55;
  drawing.lineWidth = 1.5 * HATCH_SCALE;
  // The neighbours' lines fill the corners.
  for (const by of [-size, 0, size]) {
    drawing.moveTo(by - size, lean > 0 ? 2 * size : -size);
    drawing.lineTo(by + 2 * size, lean > 0 ? -size : 2 * size);
  }
  drawing.stroke();
  const pattern = context.createPattern(tile, "repeat");
  hatches.set(key, pattern);
  return pattern;
}

/** Fills of downloads and uploads; their stripes move with the time that `origin_px` is the place of. */
function transferFills(context: CanvasRenderingContext2D, palette: Palette, origin_px: number): { download: Fill; upload: Fill } {
  const moved = new DOMMatrix([1 / HATCH_SCALE, 0, 0, 1 / HATCH_SCALE, origin_px % HATCH_PX, 0]);
  const fill = (colour: string, lean: number): Fill => {
    const pattern = hatched(context, colour, palette.surface, lean);
    pattern?.setTransform(moved);
    return pattern ?? colour;
  };
  return { download: fill(palette.download, -1), upload: fill(palette.upload, 1) };
}

const SQUARE_PX = 10;

/** A block with round corners, where it is high enough to show them. */
function fillBlock(context: CanvasRenderingContext2D, box: Box, fill: Fill): void {
  context.fillStyle = fill;
  const [x, y, width, height] = box;
  if (height < SQUARE_PX) {
    context.fillRect(x, y, width, height);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, width, height, Math.min(3, width / 2));
  context.fill();
}

function dots(context: CanvasRenderingContext2D, box: Box, stripe: string): void {
  const [x, y, width, height] = box;
  context.fillStyle = stripe;
  for (let at = x + 2; at < x + width - 1; at += 5) context.fillRect(at, y + height / 2 - 1, 2, 2);
}

type Fills = Omit<Palette, "download" | "upload"> & ReturnType<typeof transferFills>;
type Painter = (context: CanvasRenderingContext2D, box: Box, fills: Fills) => void;

const PAINTERS: Record<NodePhase, Painter> = {
  train: (context, box, fills) => fillBlock(context, box, fills.train),
  download: (context, box, fills) => fillBlock(context, box, fills.download),
  upload: (context, box, fills) => fillBlock(context, box, fills.upload),
  encode: (context, box, fills) => {
    fillBlock(context, box, fills.encode);
    dots(context, box, fills.surface);
  },
  wait: (context, [x, y, width, height], fills) => {
    context.fillStyle = fills.wait;
    context.fillRect(x, y + height / 2 - 0.75, width, 1.5);
  },
  pause: (context, [x, y, width, height], fills) => {
    context.fillStyle = fills.pause;
    for (const top of [y + height / 2 - 3, y + height / 2 + 1.5]) context.fillRect(x, top, width, 1.5);
  },
  rest: (context, [x, y, width, height], fills) => {
    context.strokeStyle = fills.rest;
    context.setLineDash([3, 4]);
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 2.5, Math.max(0, width - 1), height - 5);
    context.setLineDash([]);
  },
};

const MARKS: Partial<Record<LaneOutcome, [string, keyof Palette]>> = {
  accepted: ["✓", "good"],
  rejected: ["✕", "bad"],
  handed_back: ["↩", "warn"],
  lost: ["✕", "bad"],
};

class Painting {
  readonly context: CanvasRenderingContext2D;
  readonly bottom: number;
  readonly fills: Fills;

  constructor(readonly drawing: Drawing) {
    this.context = drawing.canvas.getContext("2d") as CanvasRenderingContext2D;
    this.bottom = HEAD_PX + drawing.order.length * drawing.row_px;
    this.fills = { ...drawing.palette, ...transferFills(this.context, drawing.palette, this.x(drawing.origin_ms)) };
  }

  x(at_ms: number): number {
    return toPixel(this.drawing.scale, at_ms);
  }

  draw(): void {
    const { context, drawing } = this;
    const { scale, palette } = drawing;
    const ratio = window.devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, scale.size, this.bottom + 2);
    context.font = "11px system-ui, sans-serif";
    this.drawAxis();
    const shown = drawing.rounds.filter((each) => this.reachOf(each) >= scale.from && each.started_at_ms <= scale.to);
    for (const round of shown) this.drawRoundBack(round);
    for (const round of shown) drawing.order.forEach((node, place) => this.drawLane(round, node, place));
    for (const round of shown) this.drawLimits(round);
    if (drawing.is_moving) this.drawLine(drawing.now_ms, palette.accent, [], HEAD_PX - 4);
  }

  reachOf(round: Round): number {
    return Math.max(endOf(round, this.drawing.now_ms), round.ended_at_ms === null ? (round.deadline_at_ms ?? 0) : 0);
  }

  drawAxis(): void {
    const { context, drawing } = this;
    const { scale, palette } = drawing;
    context.fillStyle = palette.muted;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    const all = timeTicks(scale.from, scale.to, drawing.origin_ms, scale.size / 90);
    const ticks = all.filter((at) => at >= drawing.origin_ms);
    const isFine = (ticks[1] ?? 0) - (ticks[0] ?? 0) < 1000;
    for (const at of ticks) {
      const tenths = isFine ? `.${Math.floor((at - drawing.origin_ms) / 100) % 10}` : "";
      context.fillText(elapsed(at - drawing.origin_ms) + tenths, this.x(at) + 4, 12);
      context.fillStyle = palette.line;
      context.fillRect(Math.round(this.x(at)), 2, 1, 12);
      context.fillStyle = palette.muted;
    }
    context.fillStyle = palette.line;
    drawing.order.forEach((_, place) => context.fillRect(0, HEAD_PX + (place + 1) * drawing.row_px - 0.5, scale.size, 0.5));
    context.fillRect(0, HEAD_PX - 0.5, scale.size, 1);
  }

  drawRoundBack(round: Round): void {
    const { context, drawing } = this;
    const { palette, cell } = drawing;
    const from = this.x(round.started_at_ms);
    const to = this.x(endOf(round, drawing.now_ms));
    const isChosen = cell?.round === round.number;
    context.fillStyle = isChosen ? palette.accent : palette.raised;
    context.globalAlpha = isChosen ? 0.1 : 1;
    context.fillRect(from, HEAD_PX, to - from, this.bottom - HEAD_PX);
    context.globalAlpha = 1;
    context.fillStyle = palette.line;
    context.fillRect(Math.round(from), 18, 1, this.bottom - 18);
    this.drawRoundName(round, Math.max(from, 0), to);
  }

  drawRoundName(round: Round, from: number, to: number): void {
    const { context, drawing } = this;
    const room = to - from - 8;
    const names = [`Round ${round.number + 1}`, String(round.number + 1)];
    if (round.duration_ms !== null) names.unshift(`Round ${round.number + 1} · ${duration(round.duration_ms)}`);
    const text = names.find((each) => context.measureText(each).width <= room);
    if (!text) return;
    context.fillStyle = drawing.palette.text;
    context.fillText(text, from + 5, HEAD_PX - 9);
  }

  drawLane(round: Round, node: string, place: number): void {
    const lane = round.lanes[node];
    if (!lane) return;
    const { drawing } = this;
    const pad = drawing.row_px >= 24 ? 6 : drawing.row_px >= 18 ? 4 : 2;
    const top = HEAD_PX + place * drawing.row_px;
    if (drawing.cell?.node === node && drawing.cell.round === round.number) this.drawChoice(round, top);
    this.drawSpread(round, lane, top);
    for (const segment of lane.segments) this.drawSegment(round, segment, top + pad, drawing.row_px - 2 * pad);
    this.drawForecast(round, lane, top);
    this.drawMark(round, lane, top);
  }

  drawChoice(round: Round, top: number): void {
    const { context, drawing } = this;
    const from = this.x(round.started_at_ms);
    context.strokeStyle = drawing.palette.accent;
    context.lineWidth = 1.5;
    context.strokeRect(from + 1, top + 1.5, this.x(endOf(round, drawing.now_ms)) - from - 2, drawing.row_px - 3);
  }

  drawSegment(round: Round, segment: Segment, y: number, height: number): void {
    const { scale, now_ms } = this.drawing;
    const end = segment.end_ms ?? endOf(round, now_ms);
    if (end < scale.from || segment.start_ms > scale.to) return;
    const from = Math.max(-4, this.x(segment.start_ms));
    const to = Math.min(scale.size + 4, this.x(end));
    PAINTERS[segment.phase](this.context, [from, y, Math.max(1, to - from - 0.75), height], this.fills);
  }

  drawSpread(round: Round, lane: Lane, top: number): void {
    if (lane.forecast_ms === null || !lane.forecast_spread_ms) return;
    const { context, drawing } = this;
    const middle = round.started_at_ms + lane.forecast_ms;
    const last = round.ended_at_ms ?? Infinity;
    const from = this.x(Math.min(last, middle - lane.forecast_spread_ms));
    context.globalAlpha = 0.13;
    context.fillStyle = drawing.palette.text;
    context.fillRect(from, top + 2, this.x(Math.min(last, middle + lane.forecast_spread_ms)) - from, drawing.row_px - 4);
    context.globalAlpha = 1;
  }

  drawForecast(round: Round, lane: Lane, top: number): void {
    if (lane.forecast_ms === null || lane.result === "resting") return;
    const { context, drawing } = this;
    const at = round.started_at_ms + lane.forecast_ms;
    context.fillStyle = drawing.palette.text;
    if (at > (round.ended_at_ms ?? Infinity)) {
      this.drawLaterForecast(this.x(round.ended_at_ms ?? at), top + drawing.row_px / 2);
      return;
    }
    const x = Math.round(this.x(at));
    context.fillRect(x - 0.75, top + 2, 1.5, drawing.row_px - 4);
    context.beginPath();
    context.moveTo(x - 4, top + 1.5);
    context.lineTo(x + 4, top + 1.5);
    context.lineTo(x, top + 6.5);
    context.fill();
  }

  /** The round closed before the forecast moment: an arrow at its end points there. */
  drawLaterForecast(x: number, y: number): void {
    const { context } = this;
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(x - 7, y - 4);
    context.lineTo(x - 2, y);
    context.lineTo(x - 7, y + 4);
    context.fill();
    context.globalAlpha = 1;
  }

  drawMark(round: Round, lane: Lane, top: number): void {
    const mark = MARKS[lane.result];
    if (!mark) return;
    const { context, drawing } = this;
    const [text, colour] = mark;
    const at = arrivedAt(lane) ?? round.ended_at_ms ?? drawing.now_ms;
    const size = Math.min(13, drawing.row_px - 6);
    const x = this.x(at) + (lane.result === "lost" ? -size : 3);
    if (drawing.row_px < 16 && lane.result === "accepted") return;
    context.font = `700 ${size}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    context.lineWidth = 3;
    context.strokeStyle = drawing.palette.surface;
    context.strokeText(text, x, top + drawing.row_px / 2 + 1);
    context.fillStyle = drawing.palette[colour];
    context.fillText(text, x, top + drawing.row_px / 2 + 1);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
  }

  drawLine(at_ms: number, colour: string, dash: number[], top: number): void {
    const { context } = this;
    const x = Math.round(this.x(at_ms)) + 0.5;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, this.bottom);
    context.stroke();
    context.setLineDash([]);
  }

  drawLimits(round: Round): void {
    const { drawing } = this;
    const quorum = quorumAt(round);
    if (quorum !== null) this.drawLine(quorum, drawing.palette.muted, [1.5, 3], HEAD_PX - 6);
    const deadline = round.deadline_at_ms;
    if (deadline === null) return;
    const isReached = round.ended_at_ms === null || deadline <= round.ended_at_ms;
    if (isReached) this.drawLine(deadline, drawing.palette.bad, [6, 4], HEAD_PX - 6);
    const x = Math.round(this.x(deadline));
    this.context.fillStyle = drawing.palette.bad;
    this.context.globalAlpha = isReached ? 1 : 0.55;
    this.context.beginPath();
    this.context.moveTo(x - 4, HEAD_PX - 7);
    this.context.lineTo(x + 4, HEAD_PX - 7);
    this.context.lineTo(x, HEAD_PX - 1);
    this.context.fill();
    this.context.globalAlpha = 1;
  }
}

export function drawTimeline(drawing: Drawing): void {
  new Painting(drawing).draw();
}
