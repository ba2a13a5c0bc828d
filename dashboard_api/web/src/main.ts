import { mount } from "svelte";
import App from "./App.svelte";
import "./style.css";
import { startFeed } from "./feed";
import type { Frame } from "./lib/frames";
import { openSession } from "./state/session.svelte";
import { player } from "./state/player.svelte";
import { feed } from "./state/feed.svelte";
import { ticker } from "./state/ticker.svelte";
import { link, view } from "./state/view.svelte";

/** A recording of one job opens at that job. */
function openOnlyJob(): void {
  const jobs = Object.keys(feed.state?.jobs ?? {});
  if (!location.hash && jobs.length === 1 && jobs[0]) location.hash = link("job", jobs[0]);
}

async function recording(): Promise<[number, Frame][] | null> {
  const held = document.getElementById("recording");
  if (held?.textContent?.trim()) return JSON.parse(held.textContent) as [number, Frame][];
  const wanted = import.meta.env.DEV ? new URLSearchParams(location.search).get("fixture") : null;
  return wanted ? ((await (await fetch(`/fixtures/${wanted}.json`)).json()) as [number, Frame][]) : null;
}

async function start(): Promise<void> {
  view.start();
  ticker.start();
  const frames = await recording();
  if (frames) {
    player.load(frames);
    feed.link = "recorded";
    openOnlyJob();
  } else {
    await openSession();
    if (!feed.needs_login) startFeed();
  }
  const target = document.getElementById("page");
  if (target) mount(App, { target });
}

void start();
