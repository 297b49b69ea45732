"""Shared memory, messages and processes for workers: without named objects, listening sockets or polling."""

from flatroll.sharing.block import Block, BlockColumn, Memory, Table
from flatroll.sharing.channel import Channel, Closed, Listener
from flatroll.sharing.mailbox import Inbox, Outbox, ReceivedWindow, pack, unpack
from flatroll.sharing.nursery import Nursery, Worker
from flatroll.sharing.weights import SharedWeights
from flatroll.sharing.worker import WorkerDied, WorkerTraceback

__all__ = [
    "Block",
    "BlockColumn",
    "Channel",
    "Closed",
    "Inbox",
    "Listener",
    "Memory",
    "Nursery",
    "Outbox",
    "ReceivedWindow",
    "SharedWeights",
    "Table",
    "Worker",
    "WorkerDied",
    "WorkerTraceback",
    "pack",
    "unpack",
]
