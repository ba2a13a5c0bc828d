import { describe, expect, it } from "vitest";
import { LINES_MOST, each, lines, written } from "../src/lib/batches";

describe("a file of requests", () => {
  it("has those of OpenAI's batches and plain ones", () => {
    const content = [
      JSON.stringify({ custom_id: "a", method: "POST", url: "/v1/chat/completions", body: { model: "m", messages: [{ role: "user", content: "hi" }], max_tokens: 5 } }),
      "",
      JSON.stringify({ prompt: "once", temperature: 0.5, seed: 9 }),
    ].join("\r\n");
    expect(lines(content)).toEqual([
      { id: "a", order: { messages: [{ role: "user", content: "hi" }], temperature: 0, seed: 1, new_tokens_most: 5 }, problem: "" },
      { id: "line 2", order: { text: "once", temperature: 0.5, seed: 9, new_tokens_most: 256 }, problem: "" },
    ]);
  });

  it("tells of each line that is not asked why", () => {
    expect(lines('{"a": 1}\nnot json\n[1]').map((line) => line.problem)).toEqual([
      "it has no messages, prompt or text",
      "it is no JSON",
      "it is no object",
    ]);
  });

  it("is refused where it is empty or too long", () => {
    expect(() => lines("\n \n")).toThrow("no lines");
    expect(() => lines('{"prompt": "a"}\n'.repeat(LINES_MOST + 1))).toThrow("Use the API's batches");
  });
});

describe("answers", () => {
  it("are written in the order of the requests, those that are there", () => {
    const one = { custom_id: "b", answer: "hi", tokens: 1, error: null };
    expect(written([null, one])).toBe('{"custom_id":"b","answer":"hi","tokens":1,"error":null}\n');
  });

  it("are asked for a few at a time, each once", async () => {
    let open = 0, most = 0;
    const places: number[] = [];
    await each(9, 4, async (place) => {
      most = Math.max(most, ++open);
      await Promise.resolve();
      places.push(place);
      open--;
    });
    expect(places.toSorted((a, b) => a - b)).toEqual([0, 1, 2, 3, 4, 5, 6, 7, 8]);
    expect(most).toBe(4);
  });
});
