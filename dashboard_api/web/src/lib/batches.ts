// A file of requests that the page has answered one after another. Requests and answers stay in the page.
import type { Order } from "./answers";

export interface BatchLine {
  id: string;
  order: Order | null;
  /** Why the line is not asked; empty: it is. */
  problem: string;
}

export const LINES_MOST = 2000;
export const AT_ONCE = 4;
const TOKENS_USUAL = 256;

interface Written {
  custom_id?: unknown;
  body?: unknown;
  messages?: unknown;
  prompt?: unknown;
  text?: unknown;
  temperature?: unknown;
  seed?: unknown;
  max_tokens?: unknown;
  max_completion_tokens?: unknown;
}

/** The requests of a file of JSON lines: those of OpenAI's batches, or objects with messages, a prompt or a text. */
export function lines(content: string): BatchLine[] {
  const written = content.split(/\r?\n/).filter((line) => line.trim() !== "");
  if (written.length === 0) throw new Error("The file has no lines. Choose one with a JSON object a line.");
  if (written.length > LINES_MOST) throw new Error(`The file has ${written.length} lines, and the page takes ${LINES_MOST}. Use the API's batches: docs/serve.md.`);
  return written.map((line, place) => parsed(line, place));
}

function parsed(line: string, place: number): BatchLine {
  const usual = `line ${place + 1}`;
  let found: Written;
  try {
    found = JSON.parse(line) as Written;
  } catch {
    return { id: usual, order: null, problem: "it is no JSON" };
  }
  if (typeof found !== "object" || found === null || Array.isArray(found)) return { id: usual, order: null, problem: "it is no object" };
  const id = typeof found.custom_id === "string" ? found.custom_id : usual;
  const body = (typeof found.body === "object" && found.body !== null ? found.body : found) as Written;
  const settings = {
    temperature: numeric(body.temperature, 0),
    seed: numeric(body.seed, place + 1),
    new_tokens_most: numeric(body.max_completion_tokens ?? body.max_tokens, TOKENS_USUAL),
  };
  const text = body.prompt ?? body.text;
  if (Array.isArray(body.messages)) return { id, order: { ...settings, messages: body.messages as { role: string; content: string }[] }, problem: "" };
  if (typeof text === "string" && text !== "") return { id, order: { ...settings, text }, problem: "" };
  return { id, order: null, problem: "it has no messages, prompt or text" };
}

function numeric(value: unknown, usual: number): number {
  return typeof value === "number" ? value : usual;
}

export interface BatchAnswer {
  custom_id: string;
  answer: string | null;
  tokens: number;
  error: string | null;
}

/** The file of answers, in the order of the requests. */
export function written(answers: (BatchAnswer | null)[]): string {
  return answers.filter((one) => one !== null).map((one) => `${JSON.stringify(one)}\n`).join("");
}

/** Have all places done, so many at once, in order. */
export async function each(places: number, most: number, act: (place: number) => Promise<void>): Promise<void> {
  let next = 0;
  const work = async (): Promise<void> => {
    while (next < places) await act(next++);
  };
  await Promise.all(Array.from({ length: Math.min(most, places) }, work));
}
