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
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        # Jobs end in order, so the last one ends last.
        return self._last is None or self._last.ended

    def submit(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_complete, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        self._last = job
        self._jobs.put(job)

    def finish(self, job: Job) -> None:
        pass


def _complete(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.complete()
        del job  # with the result, while the thread waits for the next
