import { describe, expect, test } from "vitest";
import { applied } from "../src/lib/changes";
import { NOTHING, backoffMs, received, resumeQuery, type FeedState } from "../src/lib/feed_state";
import { EMPTY, type Change, type Hello } from "../src/lib/frames";

const hello: Hello = { type: "hello", proto: 1, epoch: "e1", seq: 4, role: "viewer", address: "a:1", recorded: false };
const whole = (seq: number): FeedState =>
  received(received(NOTHING, hello), { type: "snapshot", seq, at_ms: 1, state: EMPTY });

describe("changes", () => {
  test("set makes the objects on its way", () => {
    expect(applied({}, [["set", ["jobs", "a", "round"], 3]])).toEqual({ jobs: { a: { round: 3 } } });
  });

  test("set reaches into a list by number", () => {
    const tree = { segments: [{ end_ms: null }, { end_ms: 5 }] };
    expect(applied(tree, [["set", ["segments", 0, "end_ms"], 9]])).toEqual({ segments: [{ end_ms: 9 }, { end_ms: 5 }] });
  });

  test("append keeps the newest items only", () => {
    const list = applied<unknown>({ events: [1, 2] }, [["append", ["events"], [3, 4], 3]]);
    expect(list).toEqual({ events: [2, 3, 4] });
  });

  test("append makes a list where none is", () => {
    expect(applied<unknown>({}, [["append", ["events"], [1], 5]])).toEqual({ events: [1] });
  });

  test("drop removes, and says nothing of what is not there", () => {
    const tree = { nodes: { a: 1, b: 2 } };
    expect(applied<unknown>(tree, [["drop", ["nodes", "a"]]])).toEqual({ nodes: { b: 2 } });
    expect(applied<unknown>(tree, [["drop", ["nodes", "c", "d"]]])).toBe(tree);
  });

  test("what did not change keeps its identity, and the old tree stays as it was", () => {
    const before = { jobs: { a: { round: 1 }, b: { round: 1 } } };
    const after = applied(before, [["set", ["jobs", "a", "round"], 2]]);
    expect(after.jobs.b).toBe(before.jobs.b);
    expect(before.jobs.a.round).toBe(1);
  });

  test("any split of the same changes gives the same tree", () => {
    const changes: Change[] = [
      ["set", ["a", "b"], 1],
      ["append", ["a", "list"], [1, 2], 2],
      ["drop", ["a", "b"]],
      ["append", ["a", "list"], [3], 2],
      ["set", ["c"], { d: [] }],
    ];
    const at_once = applied<unknown>({}, changes);
    for (let split = 0; split <= changes.length; split += 1)
      expect(applied(applied<unknown>({}, changes.slice(0, split)), changes.slice(split))).toEqual(at_once);
  });
});

describe("the feed", () => {
  test("applies a delta that follows", () => {
    const feed = received(whole(4), { type: "delta", seq: 5, at_ms: 2, changes: [["set", ["coordinator", "reason"], "x"]] });
    expect([feed.seq, feed.state.coordinator.reason]).toEqual([5, "x"]);
  });

  test("passes over a delta that it has already", () => {
    const feed = whole(4);
    expect(received(feed, { type: "delta", seq: 4, at_ms: 2, changes: [["set", ["jobs"], {}]] })).toBe(feed);
  });

  test("is broken by a gap until the next snapshot", () => {
    const broken = received(whole(4), { type: "delta", seq: 7, at_ms: 2, changes: [] });
    expect(broken.is_broken).toBe(true);
    expect(resumeQuery(broken)).toBe("");
    expect(received(broken, { type: "snapshot", seq: 9, at_ms: 3, state: EMPTY }).is_broken).toBe(false);
  });

  test("resumes after what it has, and afresh in another epoch", () => {
    expect(resumeQuery(NOTHING)).toBe("");
    expect(resumeQuery(whole(4))).toBe("?epoch=e1&seq=4");
    expect(resumeQuery(received(whole(4), { ...hello, epoch: "e2" }))).toBe("");
  });

  test("waits longer after each failure, up to a limit", () => {
    expect(backoffMs(0, 0)).toBe(125);
    expect(backoffMs(0, 0.999)).toBe(250);
    expect(backoffMs(30, 0.5)).toBe(6000);
  });
});
