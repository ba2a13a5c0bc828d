// The tree that the feed sends, as docs/feed.md describes it. Times are Unix milliseconds unless a
// name ends otherwise; amounts of money are decimal strings in the ledger's smallest units.
// Made of dashboard_api/core/state.py and hypergpu/journal/events.py by `make web`: change those.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
export type EventKind = "JobCreated" | "ModelInitialised" | "PreparationFailed" | "NodeJoined" | "NodeLost" | "NodeDraining" | "NodePaused" | "NodeReadmitted" | "RoundPlanned" | "UpdateReceived" | "UpdateRejected" | "ShardHandedBack" | "MemoryFitted" | "DeadlineReached" | "AggregateReady" | "ModelLost" | "RoundRecorded" | "RoundMeasured" | "EvaluationReady" | "EvaluationFailed" | "JobPaused" | "JobResumed" | "JobStopped" | "ParametersChanged" | "CoordinatorChanged" | "JobEnded" | "FundingChanged" | "MapCreated" | "BundleReturned" | "BundleHandedBack" | "BundleAccepted" | "PartConfirmed" | "BundlesDue" | "ResultsCompared" | "ItemDropped" | "ResultDoubted" | "BudgetRaised" | "ServeCreated" | "VersionPublished" | "ModelUnloaded" | "ModelWanted" | "ReplicaHandedBack" | "RingPlaced" | "RingUnplaced" | "StandbyPlaced" | "StageMoved" | "RingRoundStored" | "WindowCounted" | "WindowSigned" | "WindowAccepted" | "WindowRefused" | "AnswerChecked" | "CheckUndecided" | "AnswerDoubted" | "StageChecked" | "StagesContradicted" | "CountsClosed" | "SettlementDue";
export type NodePhase = "download" | "train" | "encode" | "upload" | "wait" | "pause" | "rest";
export type LaneOutcome = "pending" | "accepted" | "rejected" | "handed_back" | "lost" | "resting";
export type HealthWord = "high" | "normal" | "low" | "poor";

/** A phase of a node's work. */
export interface Segment {
  phase: NodePhase;
  start_ms: number;
  end_ms: number | null;
}

/** A node's part of a round. */
export interface Lane {
  slot: number;
  reason: string;
  inner_steps: number;
  batch: number;
  codec: string;
  forecast_ms: number | null;
  forecast_spread_ms: number | null;
  segments: Segment[];
  /** Whether the borders between segments are the server's estimate, not the node's report. */
  is_estimate: boolean;
  result: LaneOutcome;
  result_reason: string;
  loss: number | null;
  update_bytes: number;
  quality_bps: number | null;
}

/** What a model scores on held-out samples. */
export interface Evaluation {
  loss: number | null;
  metric: number | null;
  /** Further metrics by name. */
  metrics: Record<string, number>;
  /** Held-out samples that were measured; 0: not told. */
  samples: number;
  samples_all: number;
}

/** A round; ``number`` counts from 0. */
export interface Round {
  number: number;
  started_at_ms: number;
  ended_at_ms: number | null;
  deadline_at_ms: number | null;
  /** Updates without which the round does not close at its deadline, as journalled: as it opened, and of a round that has closed, as it closed. 0: not known. */
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
  held_out_loss?: number | null;
  /** Further metrics by name. */
  metrics?: Record<string, number>;
  forecast_error: number | null;
}

/** A participant's progress in the open round. */
export interface NodeLevel {
  state: string;
  phase: NodePhase;
  steps_done: number;
  steps_total: number;
  loss: number | null;
  reason: string;
}

/** An event in a sentence. */
export interface EventLine {
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

/** The model's output for each of the job's examples at an evaluation. */
export interface OutputSample {
  /** How many rounds made the model. */
  round: number;
  at_ms: number;
  outputs: string[];
}

/** A node's account in a job; amounts are decimal text in the token's smallest unit. */
export interface NodePay {
  receipts: number;
  worth: string;
  paid: string;
  allotted: string;
}

/** A transaction of a job. */
export interface TransactionLine {
  hash: string;
  purpose: string;
  state: string;
  block: number;
  confirmations: number;
}

/** Receipts and settlement of a job. */
export interface Payments {
  receipts: number;
  score: number;
  worth: string;
  paid: string;
  escrow: string;
  halted: string;
  nodes: Record<string, NodePay>;
  transactions: TransactionLine[];
}

/** A node's accepted and measured work in a job. */
export interface NodeContribution {
  samples: number;
  compute_ms: number;
}

/** Items that were given out and are not settled. */
export interface OpenRun {
  start: number;
  items: number;
}

/** A node's accepted work in a farm job. */
export interface FarmNode {
  bundles: number;
  items: number;
  units: number;
  /** Items with a reason in place of a value. */
  failures: number;
  /** Bundles that it gave back undone. */
  handed_back: number;
  /** Results that others outvoted. */
  doubts: number;
  /** Between its newest results; null: it has not returned two. */
  items_per_s: number | null;
  /** When its newest result was accepted; 0: never. */
  at_ms: number;
}

/** Progress of a job of independent items. No text or value of an item is in it. */
export interface Farm {
  item_kind: string;
  items: number;
  unit: string;
  settled_items: number;
  failed_items: number;
  units: number;
  /** Work that nodes have receipts for: accepted, and that of results which confirmed it. */
  credited_units: number;
  /** Bundles that nodes have now. */
  open_bundles: number;
  /** Items of a tile: runs of so many from the first on. */
  tile_items: number;
  /** Settled items by the tile's number; 0 where it is not there. */
  settled_by_tile: Record<string, number>;
  /** Results that others outvoted, by the tile of the bundle's first item. */
  doubted_by_tile: Record<string, number>;
  /** 1,000 at most. */
  open_runs: OpenRun[];
  nodes: Record<string, FarmNode>;
}

/** A job. */
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
  /** 0: its journal was not read yet. */
  created_at_ms: number;
  ended_at_ms: number | null;
  loss: number | null;
  metric: number | null;
  metric_name: string;
  /** ``min`` where the metric falls as the model learns, else ``max``; empty: not known. */
  target_mode?: string;
  /** Evaluation of the model before any training; None: there was none. */
  initial?: Evaluation | null;
  bytes_up: number;
  bytes_down: number;
  /** Traffic of the same steps when each one exchanges the uncompressed gradient and model. */
  naive_bytes: number;
  updates_accepted: number;
  updates_rejected: number;
  samples: number;
  samples_per_s: number | null;
  eta_ms: number | null;
  model: string | null;
  model_bytes: number;
  /** Accepted samples times their quality in 1/10,000. */
  score: number;
  spec: Record<string, Json>;
  unit_price: string;
  escrow: string;
  cost: string;
  decimals: number;
  rounds_by_number: Record<string, Round>;
  /** The training whose model is served: ``round`` is then the rounds after which its newest version is. Empty: the job serves no training's. */
  training: string;
  levels: Record<string, NodeLevel>;
  work?: Record<string, NodeContribution>;
  events: EventLine[];
  /** Held-out samples that people see; none where the workload shows none. */
  examples?: Example[];
  samples_of_output: OutputSample[];
  payments: Payments | null;
  /** Progress of a job of independent items; null: the job is of another kind. */
  farm?: Farm | null;
}

/** An update that was not accepted. */
export interface Rejection {
  at_ms: number;
  job: string;
  round: number;
  reason: string;
}

/** A time without a connection, too short or too idle for a job to lose the node. */
export interface ConnectionGap {
  from_ms: number;
  /** None: it lasts. */
  to_ms: number | null;
}

/** Parts of a node's health, each in [0, 1]. */
export interface HealthParts {
  speed: number;
  reliability: number;
  quality: number;
  uptime: number;
}

/** A node. Readings are null until they are measured. */
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
  seen_at_ms: number | null;
  software: string;
  /** Its level. */
  health: HealthWord | null;
  /** In [0, 1]. */
  health_value?: number | null;
  /** What lowers it most, or why the node is excluded. */
  health_reason?: string;
  health_parts?: HealthParts | null;
  /** What the newest plan that named it says of its part. */
  plan_reason?: string;
  pause_reason?: string;
  updates_accepted: number;
  updates_rejected: number;
  rejections: Rejection[];
  /** Newest ones that this server saw, oldest first. */
  absences?: ConnectionGap[];
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
  /** Limits that its owner set; those that are not set are left out. */
  caps: Record<string, number> | null;
}

/** Something that a person should act on, with what to do. */
export interface Alert {
  kind: string;
  severity: "critical" | "warning";
  title: string;
  reason: string;
  fix: string;
  job: string | null;
  node: string | null;
  at_ms: number;
}

/** The connection to the coordinator. */
export interface Coordinator {
  address: string;
  is_reachable: boolean;
  reason: string;
  at_ms: number;
}

/** The whole state. */
export interface State {
  coordinator: Coordinator;
  jobs: Record<string, Job>;
  nodes: Record<string, Node>;
  alerts: Record<string, Alert>;
}
