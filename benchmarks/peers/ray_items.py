"""Ray's tasks on the items of the benchmark `farm`: one machine, nothing durable.

Prints items a second. A task has the same 50 items as a bundle: it makes the same result and its
digest; the driver keeps at most two tasks a connection open.
"""

import json
import sys
import time

import ray

from hypergpu.digests import digest_of

BUNDLE_ITEMS = 50
PROCESSORS = 2


@ray.remote
def answer(start: int, items: int) -> tuple[int, str]:
    """Answer one bundle as the load generator does."""
    content = b"".join(b'{"value":%d}\n' % place for place in range(start, start + items))
    return items, digest_of(content)


def measured_items_per_s(items: int, open_most: int) -> float:
    """Have all items answered by two processes."""
    ray.init(num_cpus=PROCESSORS, include_dashboard=False, log_to_driver=False)
    ray.get([answer.remote(0, BUNDLE_ITEMS) for _ in range(8 * PROCESSORS)])
    begin_s = time.monotonic()
    open_tasks: list[object] = []
    answered_items = 0
    for start in range(0, items, BUNDLE_ITEMS):
        open_tasks.append(answer.remote(start, min(BUNDLE_ITEMS, items - start)))
        if len(open_tasks) >= open_most:
            ready_tasks, open_tasks = ray.wait(open_tasks, num_returns=open_most // 2)
            answered_items += sum(count for count, _ in ray.get(ready_tasks))
    answered_items += sum(count for count, _ in ray.get(open_tasks))
    seconds = time.monotonic() - begin_s
    ray.shutdown()
    if answered_items != items:
        raise SystemExit(f"{answered_items} of {items} items were answered")
    return items / seconds


if __name__ == "__main__":
    json.dump({"items_per_s": measured_items_per_s(int(sys.argv[1]), int(sys.argv[2]))}, sys.stdout)
