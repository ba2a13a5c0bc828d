"""What work gives goes out within the owner's upload limit, in order."""

import asyncio

from gpu_node.shell.link.paced_sending import PacedSending
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.bulk import RateLimit


def outputs(call: int, size_bytes: int) -> node_pb2.ControlRequest:
    output = work_pb2.WorkOutput(call=call, body=bytes(size_bytes))
    return node_pb2.ControlRequest(work_outputs=work_pb2.WorkOutputs(outputs=[output]))


async def test_outputs_share_the_limit_of_updates_and_keep_their_order() -> None:
    rate, loop = RateLimit(800_000), asyncio.get_running_loop()
    began_s, sent, is_over = loop.time(), list[tuple[int, float]](), asyncio.Event()

    def note(message: node_pb2.ControlRequest) -> None:
        sent.append((message.work_outputs.outputs[0].call, loop.time() - began_s))
        if len(sent) == 3:
            is_over.set()

    sending = PacedSending(note, rate)
    update_task = asyncio.create_task(rate.take(2_000))  # 20 ms of an update
    await asyncio.sleep(0)
    for call in (1, 2, 3):
        sending.send(outputs(call, 1_000))
    assert not sent
    await is_over.wait()
    assert [call for call, _ in sent] == [1, 2, 3]
    assert sent[0][1] >= 0.03
    assert sent[2][1] >= 0.05
    await update_task
    await sending.close()


async def test_without_a_limit_nothing_waits_and_what_waits_is_forgotten_with_its_stream() -> None:
    sent = list[node_pb2.ControlRequest]()
    PacedSending(sent.append, RateLimit()).send(outputs(1, 1_000))
    assert len(sent) == 1
    sending = PacedSending(sent.append, RateLimit(800_000))
    sending.send(outputs(2, 1_000))
    sending.clear()
    await asyncio.sleep(0)
    await sending.close()
    assert len(sent) == 1
