// Applies the feed's changes without touching the tree that is there: what did not change keeps its identity, so that
// the parts of the page that show it are not drawn again, and a recording's older states cost little memory.
import type { Change, Path } from "./frames";
import type { Json } from "./types";

type Tree = { [key: string]: Json };

function isTree(value: Json | undefined): value is Tree {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Lists and objects that were copied for the delta at hand: they are copied once. */
type Copies = Set<Json | undefined>;

function replaced(tree: Json | undefined, path: Path, depth: number, copies: Copies, edit: (old: Json | undefined) => Json | undefined): Json | undefined {
  const key = path[depth];
  if (key === undefined) return edit(tree);
  if (Array.isArray(tree)) {
    const copy = copies.has(tree) ? tree : tree.slice();
    copies.add(copy);
    const value = replaced(copy[Number(key)], path, depth + 1, copies, edit);
    if (value !== undefined) copy[Number(key)] = value;
    return copy;
  }
  const copy: Tree = isTree(tree) ? (copies.has(tree) ? tree : { ...tree }) : {};
  copies.add(copy);
  const value = replaced(copy[key], path, depth + 1, copies, edit);
  if (value === undefined) delete copy[key];
  else copy[key] = value;
  return copy;
}

function has(tree: Json, path: Path): boolean {
  let here: Json | undefined = tree;
  for (const key of path) {
    if (Array.isArray(here)) here = here[Number(key)];
    else if (isTree(here)) here = here[key];
    else return false;
  }
  return here !== undefined;
}

function changed(tree: Json, change: Change, copies: Copies): Json {
  const [kind, path] = change;
  if (kind === "drop") return has(tree, path) ? (replaced(tree, path, 0, copies, () => undefined) ?? {}) : tree;
  if (kind === "set") return replaced(tree, path, 0, copies, () => change[2]) ?? {};
  const [, , items, keep] = change;
  const grow = (old: Json | undefined): Json => {
    const list = Array.isArray(old) ? old.concat(items) : items.slice();
    return list.slice(Math.max(0, list.length - keep));
  };
  return replaced(tree, path, 0, copies, grow) ?? {};
}

/** The tree after all changes, in order. */
export function applied<T>(tree: T, changes: readonly Change[]): T {
  const copies: Copies = new Set();
  return changes.reduce<Json>((now, change) => changed(now, change, copies), tree as Json) as T;
}
