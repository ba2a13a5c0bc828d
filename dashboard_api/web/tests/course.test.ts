import { expect, test } from "vitest";
import { coursePlace, oldestRound, roundNear, type Course } from "../src/lib/course";
import { jobAt, sortedRounds } from "../src/lib/job_at";
import { curves } from "../src/lib/progress";
import { moments } from "../src/lib/recording";
import type { Frame } from "../src/lib/frames";
import type { Job } from "../src/lib/types";
import recorded from "../fixtures/demo.json";

const job = Object.values(moments(recorded as unknown as [number, Frame][]).at(-1)?.state.jobs ?? {}).find((each) => each.name === "demo") as Job;
const rounds = sortedRounds(job);
const OLDEST = 8;
/** The same job when the feed has let go of its first rounds. */
const late: Job = { ...job, rounds_by_number: Object.fromEntries(rounds.slice(OLDEST).map((each) => [each.number, each])) };
const older = Object.fromEntries(rounds.slice(0, OLDEST).map((each) => [each.number, each]));

function courseOf(): Course {
  let moved = 0;
  const values = rounds.map((each) => each.loss);
  const same = { min: values, max: values, mean: values };
  return {
    at_ms: rounds.map((each) => each.ended_at_ms ?? 0),
    moved_bytes: rounds.map((each) => (moved += each.bytes_up + each.bytes_down)),
    round: rounds.map((each) => each.number),
    further: {},
    series: { loss: same, metric: same, held_out_loss: same, samples_per_s: same, forecast_error: same, accepted_share: same },
  };
}

test("a moment leads to the round that was open then", () => {
  expect(oldestRound(late)).toBe(OLDEST);
  const course = courseOf();
  for (const round of rounds.slice(0, OLDEST)) {
    const middle = (round.started_at_ms + (round.ended_at_ms ?? 0)) / 2;
    expect(Math.abs(roundNear(course, middle, late, OLDEST) - round.number)).toBeLessThanOrEqual(1);
  }
  expect(coursePlace(course, job.created_at_ms)).toBe(-1);
});

test("curves over time are the same whether the feed or the course tells of the first rounds", () => {
  const all = curves(late, "time", courseOf(), OLDEST);
  expect(all.x).toEqual(curves(job, "time").x);
  expect(all.loss).toEqual(curves(job, "time").loss);
  expect(all.least.loss).toHaveLength(all.x.length);
});

test("with its older rounds, the job at a moment is as if the feed had kept them", () => {
  const at_ms = (rounds[4]?.ended_at_ms ?? 0) + 1;
  const then = jobAt(late, at_ms, older, courseOf());
  expect(then.rounds_by_number).toEqual(jobAt(job, at_ms).rounds_by_number);
  expect([then.round, then.loss]).toEqual([5, rounds[4]?.loss]);
});
