// Which tone a phase, a state, a level of health has; the word always stands beside it.
export type Tone = "good" | "warn" | "bad" | "calm" | "accent";

const TONES: Record<string, Tone> = {
  training: "accent",
  planning: "accent",
  aggregating: "accent",
  finishing: "accent",
  finished: "good",
  paused: "warn",
  waiting: "warn",
  preparing: "calm",
  stopped: "calm",
  failed: "bad",
  working: "accent",
  idle: "good",
  draining: "warn",
  lost: "bad",
  away: "bad",
  excluded: "bad",
  revoked: "bad",
  high: "good",
  normal: "good",
  low: "warn",
  poor: "bad",
  final: "good",
  mined: "accent",
  accepted: "good",
  pending: "calm",
  rejected: "bad",
  handed_back: "warn",
  resting: "calm",
  critical: "bad",
  warning: "warn",
};

export const toneOf = (word: string): Tone => TONES[word] ?? "calm";
const ENDED = new Set(["finished", "stopped", "failed"]);
export const hasEnded = (phase: string): boolean => ENDED.has(phase);
