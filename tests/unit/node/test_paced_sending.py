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
    began_s, sent_messages, is_over = loop.time(), list[tuple[int, float]](), asyncio.Event()

    def note(message: node_pb2.ControlRequest) -> None:
        sent_messages.append((message.work_outputs.outputs[0].call, loop.time() - began_s))
        if len(sent_messages) == 3:
            is_over.set()

    paced_sending = PacedSending(note, rate)
    update_task = asyncio.create_task(rate.take(2_000))  # 20 ms of an update
    await asyncio.sleep(0)
    for call in (1, 2, 3):
        paced_sending.send(outputs(call, 1_000))
    assert not sent_messages
    await is_over.wait()
    assert [call for call, _ in sent_messages] == [1, 2, 3]
    assert sent_messages[0][1] >= 0.03
    assert sent_messages[2][1] >= 0.05
    await update_task
    await paced_sending.close()


async def test_without_a_limit_nothing_waits_and_what_waits_is_forgotten_with_its_stream() -> None:
    sent_messages = list[node_pb2.ControlRequest]()
    PacedSending(sent_messages.append, RateLimit()).send(outputs(1, 1_000))
    assert len(sent_messages) == 1
    paced_sending = PacedSending(sent_messages.append, RateLimit(800_000))
    paced_sending.send(outputs(2, 1_000))
    paced_sending.clear()
    await asyncio.sleep(0)
    await paced_sending.close()
    assert len(sent_messages) == 1
