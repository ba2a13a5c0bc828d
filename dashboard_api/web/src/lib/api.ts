// Calls of the server's HTTP interface. Errors come as a number, a message and a fix.
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly number: number,
    message: string,
    readonly fix: string,
  ) {
    super(message);
  }
}

interface ErrorBody {
  number?: number;
  message?: string;
  fix?: string;
}

async function failure(answer: Response): Promise<ApiError> {
  const body = (await answer.json().catch(() => ({}))) as ErrorBody;
  const message = body.message ?? `the server answered ${answer.status}`;
  return new ApiError(answer.status, body.number ?? 0, message, body.fix ?? "");
}

export async function ask(method: string, path: string, body?: unknown, type = "application/json", signal?: AbortSignal): Promise<Response> {
  const isText = typeof body === "string" || body instanceof Blob;
  let answer: Response;
  try {
    answer = await fetch(new URL(`./api/v1/${path}`, location.href.split("#")[0]), {
      method,
      credentials: "same-origin",
      ...(signal && { signal }),
      ...(body === undefined ? {} : { body: isText ? body : JSON.stringify(body), headers: { "content-type": type } }),
    });
  } catch {
    throw new ApiError(0, 0, "the server of this page does not answer", "start it again: hypergpu dashboard");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function call<T>(method: string, path: string, body?: unknown, type?: string): Promise<T> {
  const answer = await ask(method, path, body, type);
  return (answer.status === 204 ? null : await answer.json()) as T;
}

export const get = <T>(path: string): Promise<T> => call<T>("GET", path);
export const post = <T>(path: string, body: unknown = {}): Promise<T> => call<T>("POST", path, body);

export interface Failure {
  message: string;
  fix: string;
}

export function explained(thrown: unknown): Failure {
  if (thrown instanceof ApiError) return { message: thrown.message, fix: thrown.fix };
  return { message: thrown instanceof Error ? thrown.message : String(thrown), fix: "" };
}
