"""Memory, messages and processes for workers: nothing has a name, nothing listens, nothing is polled."""

from flatroll.sharing.block import Block, Column, Table
from flatroll.sharing.channel import Channel, Closed
from flatroll.sharing.mailbox import Inbox, Outbox, Window
from flatroll.sharing.memory import Memory
from flatroll.sharing.nursery import Nursery, Worker, WorkerDied, WorkerTraceback
from flatroll.sharing.weights import SharedWeights

__all__ = [
    "Block",
    "Channel",
    "Closed",
    "Column",
    "Inbox",
    "Memory",
    "Nursery",
    "Outbox",
    "SharedWeights",
    "Table",
    "Window",
    "Worker",
    "WorkerDied",
    "WorkerTraceback",
]
