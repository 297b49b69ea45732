"""Messages over an unnamed pair of sockets."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from flatroll.sharing import Channel, Closed, Memory


def test_messages_arrive_once_and_in_order_of_their_kind() -> None:
    here, there = Channel.pair()
    for number in range(5):
        here.send("odd" if number % 2 else "even", number)
    assert there.receive("odd") == 1
    assert [there.receive("even") for _ in range(3)] == [0, 2, 4]
    assert there.receive() == ("odd", 3)
    assert there.pop() is None
    with pytest.raises(TimeoutError, match=r"no message of kind .* came within 0.01 s"):
        there.receive("odd", timeout=0.01)


def test_both_sides_may_send_much_at_once() -> None:
    here, there = Channel.pair()
    big = torch.arange(3_000_000)  # 24 MB, far beyond what a socket holds
    received = []

    def other_side() -> None:
        there.send("big", big)
        received.append(there.receive("big", timeout=600))

    thread = threading.Thread(target=other_side, daemon=True)
    thread.start()
    here.send("big", big)
    assert torch.equal(here.receive("big", timeout=600), big)
    thread.join(600)
    assert torch.equal(received[0], big)


def test_what_was_sent_before_the_end_is_received() -> None:
    here, there = Channel.pair()
    here.send("last", 1)
    here.finish()
    assert there.hung_up()
    there.send("answer", 2)  # only one direction is closed
    assert here.receive("answer") == 2
    assert there.receive("last") == 1
    with pytest.raises(Closed):
        there.receive("last")
    here.close()
    with pytest.raises(Closed):
        there.send("into nothing")
    with pytest.raises(Closed, match="this channel is closed"):
        here.send("from nothing")


def test_nothing_is_sent_of_what_cannot_be_pickled() -> None:
    here, there = Channel.pair()
    with pytest.raises(TypeError, match="cannot pickle"):
        here.send("lock", threading.Lock())
    here.send("next", 1)
    assert there.receive() == ("next", 1)


def test_one_object_stays_one_and_nothing_stays_open() -> None:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    here, there = Channel.pair()
    memory = Memory(10)
    inner, outer = Channel.pair()
    here.send("all", {"memory": [memory, memory], "channel": outer})
    got = there.receive("all")
    assert got["memory"][0] is got["memory"][1]
    inner.send("through", 3)
    assert got["channel"].receive("through") == 3
    assert not os.get_inheritable(got["channel"].fileno())
    here.send("unread", memory)
    there.feed()
    del here, there, memory, inner, outer, got
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_socket_listens_and_none_has_a_name() -> None:
    here, there = Channel.pair()
    inodes = {os.readlink(f"/proc/self/fd/{end.fileno()}")[8:-1] for end in (here, there)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    assert {len(line) for line in lines if line[6] in inodes} == {7}  # the eighth would be a path
