"""Ray's calls with each actor in a process of this machine: actors can be killed, hang, and be asked beside a call."""

import os
import pickle
import threading
from collections import deque
from itertools import count
from multiprocessing.connection import wait as wait_for_any
from queue import SimpleQueue

import cloudpickle

from flatroll.sharing import Channel, Nursery, WorkerDied


def serve(channel: Channel, kind) -> None:
    """Run the calls of an actor one after the other in a thread, and those of a group at once."""
    instance, calls, results = kind(), SimpleQueue(), deque()
    finished, finish = os.pipe()
    sent = threading.Semaphore(0)

    def run():
        while True:
            number, method, arguments = calls.get()
            results.append((number, getattr(instance, method)(*arguments)))
            os.write(finish, b".")
            sent.acquire()  # as in Ray: a result is there before the next call, which may stop the whole process

    threading.Thread(target=run, daemon=True).start()
    while not channel.ended:
        while message := channel.pop():  # first: some may have come with what started this process
            number, method, arguments, group = message[1]
            if group is None:
                calls.put((number, method, arguments))
            else:
                channel.send("result", (number, getattr(instance, method)(*arguments)))
        if finished in wait_for_any([channel, finished]):
            os.read(finished, 1)
            channel.send("result", results.popleft())
            sent.release()
        channel.feed()


class Reference:
    """A result to come, or a stored value."""

    def __init__(self, actor=None):
        self.actor, self.stored, self.error = actor, None, None

    @property
    def done(self):
        return self.stored is not None or self.error is not None


class ProcessActor:
    def __init__(self, worker):
        self.worker, self.waiting, self.dead = worker, {}, False

    def fail(self, error):
        self.dead = True
        for references in self.waiting.values():
            for reference in references:
                reference.error = error
        self.waiting.clear()

    def feed(self):
        """Take what it has sent."""
        while not self.dead and self.worker.has_news():
            try:
                number, value = self.worker.receive("result")
            except Exception as error:  # it is gone
                self.fail(error)
                return
            references = self.waiting.pop(number)
            for reference, part in zip(references, [value] if len(references) == 1 else value, strict=True):
                reference.stored = cloudpickle.dumps(part)


class ProcessRay:
    """Stands for Ray, with the processes of a nursery."""

    def __init__(self, nursery: Nursery, store=2**30):
        self.nursery, self.store, self.numbers = nursery, store, count()

    def make(self, kind, options):
        return ProcessActor(self.nursery.start(serve, kind=kind))

    def call(self, actor, method, *arguments, returns=1, group=None):
        references = [Reference(actor) for _ in range(returns)]
        if actor.dead:
            for reference in references:
                reference.error = WorkerDied("killed")
        else:
            number = next(self.numbers)
            actor.waiting[number] = references
            loaded = [
                pickle.loads(each.stored) if isinstance(each, Reference) else each for each in arguments
            ]
            actor.worker.send("call", (number, method, loaded, group))
        return references[0] if returns == 1 else references

    def wait(self, references, timeout=None):
        actors = list({id(each.actor): each.actor for each in references}.values())
        for turn in range(2):
            for actor in actors:
                actor.feed()
            ready = [reference for reference in references if reference.done]
            if ready or turn:
                return ready[:1]
            self.nursery.wait([actor.worker for actor in actors], timeout)
        return []

    def get(self, reference):
        while not reference.done:
            self.wait([reference])
        if reference.error is not None:
            raise reference.error
        return pickle.loads(reference.stored)

    def put(self, value):
        reference = Reference()
        reference.stored = cloudpickle.dumps(value)
        return reference

    def kill(self, actor):
        actor.fail(WorkerDied("killed"))
        self.nursery.end([actor.worker], 0)

    def store_bytes(self):
        return self.store

    def close(self):
        pass
