// The connection to the dashboard's server: opens the socket, resumes after a drop, and says how fresh the page is.
import { backoffMs, received, resumeQuery } from "./lib/feed_state";
import type { Frame } from "./lib/frames";
import { feed } from "./state/feed.svelte";

const STALE_AFTER_MS = 10_000;
const PING_EACH_MS = 5000;
/** A page that nobody sees draws no frames. */
const HIDDEN_EACH_MS = 250;
/** Close codes of docs/feed.md: trying again without a new session is of no use. */
const NO_SESSION = 4401;
const REFUSED = 4403;

let attempt = 0;
let socket: WebSocket | null = null;
let retry = 0;
let waiting: string[] = [];

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

/** Shows everything that came since the last frame at once: a slow machine skips states and does not fall behind. */
function takeWaiting(): void {
  const frames = waiting.map((text) => JSON.parse(text) as Frame);
  waiting = [];
  if (!frames.length) return;
  attempt = 0;
  feed.heard_at_ms = Date.now();
  feed.take(frames.reduce(received, feed.now));
  if (feed.now.is_broken && frames.some((frame) => frame.type === "delta")) socket?.close(4000, "a delta is missing");
  else if (frames.some((frame) => frame.type !== "hello")) feed.link = "live";
}

function onMessage(text: string): void {
  waiting.push(text);
  if (waiting.length > 1) return;
  if (document.hidden) window.setTimeout(takeWaiting, HIDDEN_EACH_MS);
  else requestAnimationFrame(takeWaiting);
}

export function connect(): void {
  window.clearTimeout(retry);
  feed.retry_at_ms = null;
  const opened = new WebSocket(address());
  socket = opened;
  opened.onmessage = (message: MessageEvent<string>) => onMessage(message.data);
  opened.onclose = (closed) => {
    if (socket !== opened) return;
    takeWaiting();
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
  document.addEventListener("visibilitychange", takeWaiting);
}
