// Sends a file in pieces and goes on where the server has got to, also after a dropped connection.
import { ApiError, call, get } from "./api";
import { store, stored } from "./storage";

export interface Upload {
  id: string;
  name: string;
  size_bytes: number;
  committed_bytes: number;
  piece_bytes_max: number;
}

const TRIES = 5;
const WAIT_MS = 1000;

const wait = (ms: number): Promise<void> => new Promise((resolve) => window.setTimeout(resolve, ms));

async function sendPiece(upload: Upload, file: File): Promise<Upload> {
  const from = upload.committed_bytes;
  const piece = file.slice(from, from + upload.piece_bytes_max);
  for (let tries = 1; ; tries += 1) {
    try {
      return await call<Upload>("PUT", `uploads/${upload.id}?offset=${from}`, piece, "application/octet-stream");
    } catch (thrown) {
      if (!(thrown instanceof ApiError) || (thrown.status > 0 && thrown.status < 500) || tries >= TRIES) throw thrown;
      await wait(WAIT_MS * tries);
      const now = await get<Upload>(`uploads/${upload.id}`).catch(() => null);
      if (now && now.committed_bytes > from) return now;
    }
  }
}

/** A name as the server takes it: browsers call a second download "data (1).npz". */
export function uploadName(name: string): string {
  const plain = name.replace(/[^A-Za-z0-9._ -]+/g, "_").replace(/^[^A-Za-z0-9]+/, "");
  return plain.slice(-100).replace(/^[^A-Za-z0-9]+/, "") || "data";
}

const keyOf = (file: File): string => `hypergpu.upload.${file.name}.${file.size}.${file.lastModified}`;

/** The upload that was begun with this file before, also before the page was loaded anew; null: none is there. */
async function begunUpload(file: File): Promise<Upload | null> {
  const id = stored(keyOf(file));
  const found = id ? await get<Upload>(`uploads/${id}`).catch(() => null) : null;
  return found?.size_bytes === file.size ? found : null;
}

export async function sendFile(file: File, onProgress: (upload: Upload) => void): Promise<Upload> {
  let upload = (await begunUpload(file)) ?? (await call<Upload>("POST", "uploads", { name: uploadName(file.name), size_bytes: file.size }));
  store(keyOf(file), upload.id);
  onProgress(upload);
  while (upload.committed_bytes < file.size) {
    upload = await sendPiece(upload, file);
    onProgress(upload);
  }
  return upload;
}
