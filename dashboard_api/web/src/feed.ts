// The connection to the dashboard's server: opens the socket, resumes after a drop, and says how fresh the page is.
import { backoffMs, received, resumeQuery } from "./lib/feed_state";
import type { Frame } from "./lib/types";
import { feed } from "./state/feed.svelte";

const STALE_AFTER_MS = 10_000;
const PING_EACH_MS = 5000;
/** Close codes of docs/feed.md: trying again without a new session is of no use. */
const NO_SESSION = 4401;
const REFUSED = 4403;

let attempt = 0;
let socket: WebSocket | null = null;
let retry = 0;

function address(): string {
  const base = new URL("./feed", location.href);
  base.protocol = base.protocol === "https:" ? "wss:" : "ws:";
  base.hash = "";
  return base.href.split("?")[0] + resumeQuery(feed.now);
}

function connectAgain(reason: string): void {
  const wait = backoffMs(attempt++, Math.random());
  feed.link = feed.now.has_state ? "disconnected" : "connecting";
  feed.link_reason = reason;
  feed.retry_at_ms = Date.now() + wait;
  window.clearTimeout(retry);
  retry = window.setTimeout(connect, wait);
}

function onFrame(frame: Frame): void {
  attempt = 0;
  feed.heard_at_ms = Date.now();
  feed.take(received(feed.now, frame));
  if (feed.now.is_broken && frame.type === "delta") socket?.close(4000, "a delta is missing");
  else if (frame.type !== "hello") feed.link = "live";
}

export function connect(): void {
  window.clearTimeout(retry);
  feed.retry_at_ms = null;
  const opened = new WebSocket(address());
  socket = opened;
  opened.onmessage = (message: MessageEvent<string>) => onFrame(JSON.parse(message.data) as Frame);
  opened.onclose = (closed) => {
    if (socket !== opened) return;
    socket = null;
    if (closed.code === NO_SESSION || closed.code === REFUSED) {
      feed.needs_login = true;
      feed.link = "disconnected";
      feed.link_reason = closed.reason;
      return;
    }
    connectAgain(closed.reason || "the server of this page does not answer");
  };
}

/** Tries at once where a retry is waiting. */
export function connectNow(): void {
  if (socket === null) connect();
}

function watch(): void {
  if (socket?.readyState === WebSocket.OPEN) {
    socket.send(JSON.stringify({ type: "seen", seq: feed.now.seq }));
    const quiet = Date.now() - feed.heard_at_ms;
    if (feed.link === "live" && quiet > STALE_AFTER_MS && feed.expectsNews()) feed.link = "stale";
  }
}

export function startFeed(): void {
  connect();
  window.setInterval(watch, PING_EACH_MS);
  window.addEventListener("online", connectNow);
}
