// Who looks at the page: the code of the link becomes a cookie, and the address bar forgets it.
import { ApiError, call, get, post } from "../lib/api";
import type { Role } from "../lib/frames";
import { feed } from "./feed.svelte";
import { player } from "./player.svelte";

interface Who {
  role: Role;
  name?: string;
  token?: string;
}

class Session {
  who = $state.raw<Who | null>(null);
  refused = $state("");

  get role(): Role {
    return this.who?.role ?? feed.now.hello?.role ?? "viewer";
  }

  /** Whether it may make jobs and change its own. */
  get mayAct(): boolean {
    return !player.isRecorded && (this.role === "operator" || this.role === "user");
  }

  /** Whether it sees the nodes that joined with its token, and of others nothing. */
  get isNodeOwner(): boolean {
    return this.role === "node";
  }

  /** Whether it may pause, resume and drain the nodes that it sees. */
  get maySteerNodes(): boolean {
    return !player.isRecorded && (this.role === "operator" || this.role === "node");
  }

  async end(): Promise<void> {
    await call("DELETE", "session");
    location.reload();
  }
}

export const session = new Session();

async function exchange(code: string): Promise<void> {
  try {
    await post("session", { code });
  } catch (thrown) {
    session.refused = thrown instanceof ApiError ? thrown.message : "the link could not be checked";
  }
}

export async function openSession(): Promise<void> {
  const code = /[#&]code=([^&]+)/.exec(location.hash)?.[1];
  if (code) {
    const to = /[#&]to=([\w/%]+)/.exec(location.hash)?.[1];
    history.replaceState(null, "", location.pathname + location.search + "#/");
    if (to) location.hash = `#/${to}`;
    await exchange(decodeURIComponent(code));
  }
  try {
    session.who = await get<Who>("session");
    if (session.isNodeOwner && !/^#\/./.test(location.hash)) location.hash = "#/mine";
    feed.needs_login = false;
  } catch (thrown) {
    feed.needs_login = thrown instanceof ApiError && (thrown.status === 401 || thrown.status === 403);
  }
}
