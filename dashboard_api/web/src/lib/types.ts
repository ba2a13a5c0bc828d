// The tree that the feed sends, as docs/feed.md describes it. Times are Unix milliseconds unless a name ends
// otherwise; amounts of money are decimal strings in the smallest units of the ledger's token.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type HealthLevel = "high" | "normal" | "low" | "poor";
export type SegmentPhase = "download" | "train" | "encode" | "upload" | "wait" | "pause" | "rest";
export type LaneResult = "pending" | "accepted" | "rejected" | "handed_back" | "lost" | "resting";

export interface Segment {
  phase: SegmentPhase;
  start_ms: number;
  end_ms: number | null;
}

export interface Lane {
  slot: number;
  reason: string;
  inner_steps: number;
  batch: number;
  codec: string;
  forecast_ms: number | null;
  forecast_spread_ms: number | null;
  segments: Segment[];
  result: LaneResult;
  result_reason: string;
  loss: number | null;
  update_bytes: number | null;
  quality_bps: number | null;
}

export interface Round {
  number: number;
  started_at_ms: number;
  ended_at_ms: number | null;
  deadline_at_ms: number | null;
  /** Updates that may close it at its deadline, by the journal; 0: not known. */
  updates_needed: number;
  reason: string;
  lanes: Record<string, Lane>;
  duration_ms: number | null;
  samples: number;
  samples_per_s: number | null;
  bytes_up: number;
  bytes_down: number;
  loss: number | null;
  metric: number | null;
  /** Recordings from before there were any lack these two. */
  held_out_loss?: number | null;
  metrics?: Record<string, number>;
  forecast_error: number | null;
}

export interface Evaluation {
  loss: number | null;
  metric: number | null;
  metrics: Record<string, number>;
  samples: number;
  samples_all: number;
}

export interface Level {
  state: string;
  phase: string;
  steps_done: number;
  steps_total: number;
  loss: number | null;
  reason: string;
}

export interface JobEvent {
  sequence: number;
  at_ms: number;
  kind: string;
  text: string;
  node: string | null;
  round: number | null;
}

/** A held-out sample: the beginning of a text, or an image as a data URL. */
export interface Example {
  text: string;
  image: string;
  label: string;
}

/** The model's output for each of the job's examples; `round` is how many rounds made the model. */
export interface OutputSample {
  round: number;
  at_ms: number;
  outputs: string[];
}

export interface Transaction {
  hash: string;
  purpose: string;
  state: string;
  block: number | null;
  confirmations: number | null;
}

export interface Payments {
  receipts: number;
  score: number;
  worth: string;
  paid: string;
  escrow: string;
  halted: string;
  nodes: Record<string, { receipts: number; worth: string; paid: string; allotted: string }>;
  transactions: Transaction[];
}

export interface Job {
  id: string;
  name: string;
  owner: string;
  workload: string;
  phase: string;
  reason: string;
  round: number;
  rounds: number;
  nodes: number;
  created_at_ms: number;
  ended_at_ms: number | null;
  loss: number | null;
  metric: number | null;
  metric_name: string;
  /** `min` where the metric falls as the model learns; recordings of before lack it. */
  target_mode?: string;
  /** Of the model before any training. */
  initial?: Evaluation | null;
  bytes_up: number;
  bytes_down: number;
  naive_bytes: number;
  updates_accepted: number;
  updates_rejected: number;
  samples: number;
  samples_per_s: number | null;
  eta_ms: number | null;
  model: string | null;
  spec: { [key: string]: Json };
  unit_price: string;
  escrow: string;
  cost: string;
  decimals: number;
  rounds_by_number: Record<string, Round>;
  levels: Record<string, Level>;
  work?: Record<string, { samples: number; compute_ms: number }>;
  events: JobEvent[];
  /** Recordings from before there were any lack them. */
  examples?: Example[];
  samples_of_output: OutputSample[];
  payments: Payments | null;
}

export interface Rejection {
  at_ms: number;
  job: string;
  round: number;
  reason: string;
}

/** Each in [0, 1]. */
export interface HealthParts {
  speed: number;
  reliability: number;
  quality: number;
  uptime: number;
}

export interface Node {
  id: string;
  name: string;
  owner: string;
  state: string;
  reason: string;
  device: string;
  device_name: string;
  memory_bytes: number;
  worker: string;
  job: string | null;
  seen_at_ms: number;
  software: string;
  health: HealthLevel | null;
  /** Recordings from before there were numbers lack these four. */
  health_value?: number | null;
  health_reason?: string;
  health_parts?: HealthParts | null;
  plan_reason?: string;
  pause_reason?: string;
  updates_accepted: number;
  updates_rejected: number;
  rejections: Rejection[];
  /** Times without a connection; older servers do not tell them. */
  absences?: { from_ms: number; to_ms: number | null }[];
  rtt_us: number | null;
  rtt_spread_us: number | null;
  loss: number | null;
  up_bits_per_s: number | null;
  down_bits_per_s: number | null;
  step_us: number | null;
  congestion_control: string | null;
  inner_steps: number | null;
  codec: string | null;
  batch: number | null;
  forecast_error: number | null;
  earned: string;
  joined_at_ms: number | null;
  caps: Record<string, number> | null;
}

export interface Alert {
  kind: string;
  severity: "warning" | "critical";
  title: string;
  reason: string;
  fix: string;
  job: string | null;
  node: string | null;
  at_ms: number;
}

export interface State {
  coordinator: { address: string; is_reachable: boolean; reason: string; at_ms: number };
  jobs: Record<string, Job>;
  nodes: Record<string, Node>;
  alerts: Record<string, Alert>;
}

export type Path = (string | number)[];
export type Change = ["set", Path, Json] | ["append", Path, Json[], number] | ["drop", Path];
export type Role = "operator" | "user" | "viewer" | "node";

export interface Hello {
  type: "hello";
  proto: number;
  epoch: string;
  seq: number;
  role: Role;
  address: string;
  recorded: boolean;
}
export interface Snapshot {
  type: "snapshot";
  seq: number;
  at_ms: number;
  state: State;
}
export interface Delta {
  type: "delta";
  seq: number;
  at_ms: number;
  changes: Change[];
}
export type Frame = Hello | Snapshot | Delta;

export const EMPTY: State = {
  coordinator: { address: "", is_reachable: true, reason: "", at_ms: 0 },
  jobs: {},
  nodes: {},
  alerts: {},
};
