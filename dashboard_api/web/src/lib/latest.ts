// An answer that is dropped where nobody waits for it any more.
export function keepUntil<T>(answer: Promise<T>, keep: (value: T) => void, fail: (thrown: unknown) => void): () => void {
  let isGone = false;
  answer.then(
    (value) => {
      if (!isGone) keep(value);
    },
    (thrown: unknown) => {
      if (!isGone) fail(thrown);
    },
  );
  return () => {
    isGone = true;
  };
}
