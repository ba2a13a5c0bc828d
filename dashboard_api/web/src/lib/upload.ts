// Sends a file in pieces and goes on where the server has got to, also after a dropped connection.
import { ApiError, call, get } from "./api";

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

export async function sendFile(file: File, onProgress: (upload: Upload) => void): Promise<Upload> {
  let upload = await call<Upload>("POST", "uploads", { name: file.name, size_bytes: file.size });
  onProgress(upload);
  while (upload.committed_bytes < file.size) {
    upload = await sendPiece(upload, file);
    onProgress(upload);
  }
  return upload;
}
