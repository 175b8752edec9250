"""Who carries scans on while their caller computes: a thread, the caller itself, or nobody.

A rank in the middle of a chain can pass a state on only once it has come. Over gloo someone has to
wait for it on the host, because a message there cannot be asked whether it has arrived: its
``is_completed()`` turns true only by ``wait()``, and a wait that runs out of time breaks the
connection. So polling between two pieces of the caller's work is not possible, and without a thread
every hop would start when the rank before has finished its own work: one rank after the other.
"""

import queue
import threading
import weakref
from collections import deque
from typing import Protocol

from ..groups import GroupPlace
from .job import Job


class Carrier(Protocol):
    """Completes jobs in the order in which they are submitted."""

    @property
    def idle(self) -> bool:
        """Whether no earlier job is under way, so that the next may begin at once."""

    def submit(self, job: Job) -> None:
        """Takes a job."""

    def finish(self, job: Job) -> None:
        """Sees to it that the job completes; someone is about to wait for it."""


class AtOnce:
    """Completes a job when it is submitted: where nothing holds the host."""

    idle = True

    def submit(self, job: Job) -> None:
        job.complete()

    def finish(self, job: Job) -> None:
        pass


class OnCaller:
    """Completes a job when its result is asked for, and those before it first."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    @property
    def idle(self) -> bool:
        return not self._jobs

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def finish(self, job: Job) -> None:
        while not job.done:
            self._jobs[0].complete()
            self._jobs.popleft()


class Worker:
    """Completes jobs on a thread of its own.

    The thread starts with the first job and ends with this object. It is a daemon: a process that
    ends does not wait for a peer that will never send.

    Messages of all scans of a group carry one tag and are told apart by their order alone. So a job
    waits for those that other workers of the group have been given before it; one whose result
    nobody waits for is among them, after an error in between or with its worker gone.

    Args:
        name: of the thread.
        place: the group.
    """

    def __init__(self, name: str, place: GroupPlace) -> None:
        self._name = name
        self._place = place
        self._thread: _JobThread | None = None

    @property
    def idle(self) -> bool:
        return not self._under_way()

    def submit(self, job: Job) -> None:
        earlier = self._under_way()
        thread = self._thread
        if thread is None:
            thread = self._thread = _JobThread(self._name, self._place)
            weakref.finalize(self, thread.jobs.put, None)
        thread.last_ended = job.ended
        thread.jobs.put((job, earlier))
        if not thread.is_alive():
            thread.start()

    def finish(self, job: Job) -> None:
        pass

    def _under_way(self) -> list[threading.Event]:
        """The ends of jobs on this group that are still to come: the last one of each thread."""
        threads = [thread for thread in threading.enumerate() if isinstance(thread, _JobThread)]
        lasts = [thread.last_ended for thread in threads if thread.place == self._place]
        return [ended for ended in lasts if not ended.is_set()]


class _JobThread(threading.Thread):
    """Completes jobs in order, each after the ends of others; ``None`` ends it.

    It knows of its last job no more than the end: a job holds states.
    """

    def __init__(self, name: str, place: GroupPlace) -> None:
        super().__init__(name=name, daemon=True)
        self.place = place
        self.jobs: queue.SimpleQueue[tuple[Job, list[threading.Event]] | None]
        self.jobs = queue.SimpleQueue()
        self.last_ended = threading.Event()

    def run(self) -> None:
        while (entry := self.jobs.get()) is not None:
            job, earlier = entry
            for ended in earlier:
                ended.wait()
            job.complete()
            # With the result, while the thread waits for the next.
            del entry, job, earlier
