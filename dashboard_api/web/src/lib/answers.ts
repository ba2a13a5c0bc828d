// Answers of served models, as they come. Nothing of them is kept beyond the page.
import { ask, type Failure } from "./api";

export interface AnswerLine {
  text?: string;
  tokens?: number;
  prompt_tokens?: number;
  node?: string;
  reason?: string;
  finish?: string;
  failure?: Failure;
}

export interface Order {
  messages?: { role: string; content: string }[];
  text?: string;
  temperature: number;
  seed: number;
  new_tokens_most: number;
}

export interface Turn {
  role: "user" | "assistant";
  content: string;
  tokens: number;
  seconds: number;
  node: string;
  note: string;
  failure: Failure | null;
}

export function turn(role: Turn["role"], content = ""): Turn {
  return { role, content, tokens: 0, seconds: 0, node: "", note: "", failure: null };
}

/** The turn after a line. */
export function heard(now: Turn, line: AnswerLine, seconds: number): Turn {
  const moved = line.node !== undefined && now.node !== "";
  return {
    ...now,
    content: now.content + (line.text ?? ""),
    tokens: now.tokens + (line.tokens ?? 0),
    seconds,
    node: line.node ?? now.node,
    note: moved ? "went on at another node" : line.finish === "length" ? "ended by its limit of tokens" : now.note,
    failure: line.failure ?? now.failure,
  };
}

/** Whole lines of a text that grows, and what is left of it. */
export function split(text: string): [string[], string] {
  const lines = text.split("\n");
  return [lines.slice(0, -1).filter((line) => line !== ""), lines.at(-1) ?? ""];
}

export async function* answer(job_id: string, order: Order, signal: AbortSignal): AsyncGenerator<AnswerLine> {
  const response = await ask("POST", `jobs/${job_id}/answer`, order, "application/json", signal);
  const reader = response.body?.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const part = await reader?.read();
    if (!part || part.done) return;
    const [lines, left] = split(rest + decoder.decode(part.value, { stream: true }));
    rest = left;
    for (const line of lines) yield JSON.parse(line) as AnswerLine;
  }
}
