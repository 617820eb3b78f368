"""Contestants that take turns on one machine.

OpenMP's threads spin at barriers, so a peer is several times slower while anything else runs. Hence one measurement at a
time: a worker is stopped (`SIGSTOP`) unless it is its turn, and everything that loads or warms up does so before the first
round.
"""

import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading

DEADLINE_S = 900  # of one measurement, loading and compiling included
WARM_BYTES = 4 << 30  # more than any process takes that is measured from its start


def warm_memory():
    """Touches the memory that the next process will get, in a process of its own: the peak of a parent is a child's, too.

    A virtual machine hands free memory back to its host after seconds (free page reporting), and gets it again at 2 s a GB: whoever
    comes first would pay for it.
    """
    subprocess.run([sys.executable, __file__], check=True)


def touch_memory():
    """Touches `WARM_BYTES`, or half of what is free."""
    n_bytes = min(WARM_BYTES, os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE // 2)
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, n_bytes, mmap.PAGESIZE)))


def environment(preload=()):
    """Ours, without the settings that would hold OpenBLAS back, and with the libraries a peer asks for."""
    env = {key: value for key, value in os.environ.items() if key not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    if preload:
        env["LD_PRELOAD"] = ":".join(str(library) for library in preload)
    return env


class Worker:
    """A peer that keeps its model loaded between measurements and runs only when asked."""

    warms_up = True

    def __init__(self, name, argv, log, preload=()):
        self.name = name
        self.process = subprocess.Popen(
            [str(arg) for arg in argv],
            env=environment(preload),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def measure(self, request):
        """The answer to `request`, or what went wrong under the key `error`."""
        deadline = threading.Timer(DEADLINE_S, self._signal, [signal.SIGKILL])
        deadline.start()
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        self._signal(signal.SIGSTOP)
        deadline.cancel()
        return json.loads(answer) if answer else {"error": f"the process ended, at the latest after {DEADLINE_S} s"}

    def close(self):
        """Ends the worker and all it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it ended by itself; the next answer says so


class Command:
    """A contestant that is one process a measurement: `argv(request)` starts it, `read(stdout)` finds the answer."""

    warms_up = False  # of one process nothing stays warm for the next

    def __init__(self, name, argv, read, log, preload=()):
        self.name, self.argv, self.read, self.log = name, argv, read, log
        self.env = environment(preload)

    def measure(self, request):
        """As a worker's."""
        argv = [str(arg) for arg in self.argv(request)]
        pipes = {"stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        warm_memory()
        try:
            done = subprocess.run(argv, env=self.env, check=True, timeout=DEADLINE_S, **pipes)
            return self.read(done.stdout)
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": str(error)}
        except (LookupError, ValueError):
            return {"error": f"no answer from {' '.join(argv)}"}

    def close(self):
        """Nothing is left running."""


def take_turns(contestants, requests, rounds, warm_up=dict):
    """Yields `(name, request, answers)`; in every round each contestant measures each request once.

    A worker measures `warm_up(request)` before the first round. Who fails twice is out of the other rounds of the request.
    All are closed at the end.
    """
    try:
        for request in requests:
            for worker in contestants:
                if worker.warms_up:
                    worker.measure(warm_up(request))
            answers = {contestant.name: [] for contestant in contestants}
            for _ in range(rounds):
                for contestant in contestants:
                    measured = answers[contestant.name]
                    if sum("error" in answer for answer in measured) < 2:
                        measured.append(contestant.measure(request))
            yield from ((name, request, measured) for name, measured in answers.items())
    finally:
        for contestant in contestants:
            contestant.close()


def spread(answers, key):
    """Median, least and greatest of `key`, or None if nobody measured it."""
    values = [answer[key] for answer in answers if key in answer]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


if __name__ == "__main__":
    touch_memory()
