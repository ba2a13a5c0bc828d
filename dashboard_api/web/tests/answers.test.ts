import { expect, test } from "vitest";
import { heard, split, turn } from "../src/lib/answers";

test("whole lines are taken and the rest waits", () => {
  expect(split('{"a":1}\n{"b"')).toEqual([['{"a":1}'], '{"b"']);
  expect(split("\n\n")).toEqual([[], ""]);
  expect(split("")).toEqual([[], ""]);
});

test("a turn grows by its lines and says where it went on", () => {
  const lines = [{ node: "one" }, { prompt_tokens: 3 }, { text: "Hel", tokens: 1 }, { node: "two" }, { text: "lo", tokens: 1 }, { finish: "stop" }];
  const whole = lines.reduce((now, line, place) => heard(now, line, place), turn("assistant"));
  expect(whole).toMatchObject({ content: "Hello", tokens: 2, node: "two", note: "went on at another node", seconds: 5 });
  expect(heard(whole, { finish: "length" }, 6).note).toBe("ended by its limit of tokens");
  expect(heard(whole, { failure: { message: "gone", fix: "" } }, 6).failure?.message).toBe("gone");
});
