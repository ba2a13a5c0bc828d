// What a transaction does, in words, out of its purpose: `batch/JOB/2`, `pay/JOB/2/0`, ...
const WORDS: Record<string, string> = {
  approve: "lets the ledger take the escrow",
  open: "opens the job's escrow",
  batch: "records contributions of epoch",
  record: "records contributions of epoch",
  pay: "pays shares of epoch",
  late: "pays shares after the window of epoch",
  close: "closes epoch",
  end: "ends the job on the ledger",
};

export function purposeText(purpose: string): string {
  const [kind = "", , epoch] = purpose.split("/");
  const words = WORDS[kind];
  if (!words) return purpose;
  return words.endsWith("epoch") && epoch !== undefined ? `${words} ${Number(epoch) + 1}` : words;
}
