// Linear scales and round numbers for axes.
export interface Scale {
  from: number;
  to: number;
  /** Pixels of the whole span. */
  size: number;
}

export const toPixel = (scale: Scale, value: number): number =>
  scale.to === scale.from ? 0 : ((value - scale.from) / (scale.to - scale.from)) * scale.size;

export const toValue = (scale: Scale, pixel: number): number =>
  scale.from + (scale.size ? pixel / scale.size : 0) * (scale.to - scale.from);

export const clamp = (value: number, least: number, most: number): number =>
  Math.max(least, Math.min(most, value));

const TIME_STEPS_MS = [
  100, 200, 500, 1e3, 2e3, 5e3, 10e3, 15e3, 30e3, 60e3, 120e3, 300e3, 600e3, 900e3, 1800e3, 3600e3, 7200e3, 10_800e3,
  21_600e3, 43_200e3, 86_400e3, 172_800e3, 604_800e3,
];

/** Moments for an axis, counted from `origin`, at most `most` of them. */
export function timeTicks(from: number, to: number, origin: number, most: number): number[] {
  const least = (to - from) / Math.max(1, most);
  const step = TIME_STEPS_MS.find((each) => each >= least) ?? Math.ceil(least / 604_800e3) * 604_800e3;
  const ticks: number[] = [];
  for (let at = origin + Math.ceil((from - origin) / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}

/** `from` and `to` moved into [least, most] without changing their distance where that fits. */
export function keepInside(from: number, to: number, least: number, most: number): [number, number] {
  const span = to - from;
  if (span >= most - least) return [least, least + span];
  if (from < least) return [least, least + span];
  if (to > most) return [most - span, most];
  return [from, to];
}
