// Frames of the feed, as docs/feed.md describes them.
import type { State, Json } from "./types";

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
