// Columns of the table of nodes.
import { bitsPerS, bytes, micros, money, percent, shortId, whole } from "./format";
import type { Key } from "./sorting";
import type { Node } from "./types";

export interface Column {
  id: string;
  name: string;
  title: string;
  is_number: boolean;
  key: (node: Node) => Key;
  text: (node: Node, decimals: number) => string;
}

function number(id: string, name: string, title: string, key: (node: Node) => Key, text: (node: Node, decimals: number) => string): Column {
  return { id, name, title, is_number: true, key, text };
}

export const COLUMNS: Column[] = [
  { id: "name", name: "Node", title: "The owner's name for the machine", is_number: false, key: (node) => node.name, text: (node) => node.name || shortId(node.id) },
  { id: "state", name: "State", title: "What the node does now", is_number: false, key: (node) => node.state, text: (node) => node.state },
  { id: "health", name: "Health", title: "0.4 speed + 0.3 reliability + 0.2 quality + 0.1 uptime, with its word", is_number: false, key: (node) => node.health_value ?? null, text: healthText },
  number("forecast", "Forecast error", "How far forecasts of its rounds were off, on average", (node) => node.forecast_error, (node) => percent(node.forecast_error, 0)),
  number("steps", "Steps", "H: inner steps between updates, in the newest plan", (node) => node.inner_steps, (node) => whole(node.inner_steps)),
  { id: "codec", name: "Codec", title: "Compression of its updates in the newest plan", is_number: false, key: (node) => node.codec, text: (node) => node.codec ?? "–" },
  number("batch", "Batch", "Samples in a step", (node) => node.batch, (node) => whole(node.batch)),
  number("rtt", "Round trip", "Measured round trip between node and coordinator", (node) => node.rtt_us, (node) => micros(node.rtt_us)),
  number("loss", "Packets lost", "Share of datagrams between node and coordinator that were lost", (node) => node.loss, (node) => percent(node.loss)),
  number("up", "Up", "Measured goodput of updates", (node) => node.up_bits_per_s, (node) => bitsPerS(node.up_bits_per_s)),
  number("down", "Down", "Measured goodput of models", (node) => node.down_bits_per_s, (node) => bitsPerS(node.down_bits_per_s)),
  number("accepted", "Accepted", "Updates that were accepted", (node) => node.updates_accepted, (node) => whole(node.updates_accepted)),
  number("rejected", "Rejected", "Updates that were rejected; the drawer has the reasons", (node) => node.updates_rejected, (node) => whole(node.updates_rejected)),
  number("earned", "Earned", "Worth of its receipts", (node) => Number(node.earned), (node, decimals) => money(node.earned, decimals, 2)),
];

/** Text of each column, by its id. */
export function cellsOf(node: Node, decimals: number): Record<string, string> {
  return Object.fromEntries(COLUMNS.map((column) => [column.id, column.text(node, decimals)]));
}

/** The health as people read it: the number with its word. */
export function healthText(node: Node): string {
  const value = node.health_value;
  return [value === null || value === undefined ? "" : value.toFixed(2), node.health ?? ""].filter(Boolean).join(" ") || "–";
}

/** The four parts of the health; empty where they are not known. */
export function partsText(node: Node): string {
  const parts = Object.entries(node.health_parts ?? {});
  return parts.map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ");
}

export function machineText(node: Node): string {
  const memory = node.memory_bytes ? `, ${bytes(node.memory_bytes)}` : "";
  return `${node.device_name || node.device}${memory}`;
}
