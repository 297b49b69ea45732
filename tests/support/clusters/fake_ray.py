"""Ray's calls in this process: actors run when somebody waits for them, in turn, so every test repeats itself."""

import pickle
import weakref
from collections import deque

import cloudpickle

from flatroll.sharing.worker import WorkerDied


class Reference:
    """A result to come: pickled, with arrays that come back read-only, as views of Ray's object store do."""

    def __init__(self, fake):
        self.stored = self.error = None
        fake.live.add(self)

    @property
    def done(self):
        return self.stored is not None or self.error is not None

    @property
    def nbytes(self):
        return sum(map(len, self.stored[1])) if self.stored else 0

    def store(self, value):
        buffers = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.stored = data, [bytes(buffer) for buffer in buffers]

    def load(self):
        if self.error is not None:
            raise self.error
        return pickle.loads(self.stored[0], buffers=self.stored[1])


class FakeActor:
    def __init__(self, kind, options):
        self.kind, self.options, self.instance, self.calls = kind, options, kind(), deque()
        self.dead, self.placed = False, True


class FakeRay:
    """Stands for Ray.

    ``slow`` says how many rounds an actor, by its number, takes for a call. ``nowhere`` are the numbers of actors that
    no node has room for. ``dies`` maps the number of an actor to the calls after which it dies.
    """

    def __init__(self, store=2**30, slow=(), nowhere=(), dies=()):
        self.store, self.slow, self.nowhere, self.dies = store, dict(slow), set(nowhere), dict(dies)
        self.actors, self.live, self.round, self.closed, self.puts = [], weakref.WeakSet(), 0, 0, 0
        self.most_in_flight = self.most_bytes = 0

    def make(self, kind, options):
        actor = FakeActor(kind, options)
        actor.placed = len(self.actors) not in self.nowhere
        self.actors.append(actor)
        return actor

    def call(self, actor, method, *arguments, returns=1, group=None):
        references = [Reference(self) for _ in range(returns)]
        if actor.dead:
            self.fail(references)
        elif group is not None:  # beside what the actor is at
            references[0].store(getattr(actor.instance, method)(*arguments))
        else:
            actor.calls.append((references, method, arguments))
        return references[0] if returns == 1 else references

    def fail(self, references):
        for reference in references:
            reference.error = WorkerDied("killed")

    def wait(self, references, timeout=None):
        while True:
            windows = [call for actor in self.actors for call in actor.calls if call[1] == "collect"]
            self.most_in_flight = max(self.most_in_flight, len(windows))
            ready = [reference for reference in references if reference.done]
            if ready:
                return ready[:1]
            if not self.run_round():
                assert timeout is not None, "everybody waits"
                return []

    def run_round(self):
        """One call of each actor whose turn it is; False if none has any."""
        self.round += 1
        waiting = [(i, actor) for i, actor in enumerate(self.actors) if actor.calls and actor.placed]
        for i, actor in waiting:
            if self.round % self.slow.get(i, 1) == 0:
                self.run(i, actor)
        self.most_bytes = max(self.most_bytes, sum(reference.nbytes for reference in self.live))
        return bool(waiting)

    def run(self, number, actor):
        if number in self.dies:
            self.dies[number] -= 1
            if self.dies[number] < 0:
                self.kill(actor)
                return
        references, method, arguments = actor.calls.popleft()
        loaded = [value.load() if isinstance(value, Reference) else value for value in arguments]
        result = getattr(actor.instance, method)(*loaded)
        for reference, value in zip(references, [result] if len(references) == 1 else result, strict=True):
            reference.store(value)

    def get(self, reference):
        while not reference.done:
            assert self.run_round(), "everybody waits"
        return reference.load()

    def put(self, value):
        self.puts += 1
        reference = Reference(self)
        reference.store(value)
        return reference

    def kill(self, actor):
        actor.dead, actor.instance = True, None
        while actor.calls:
            self.fail(actor.calls.popleft()[0])

    def store_bytes(self):
        return self.store

    def close(self):
        self.closed += 1
