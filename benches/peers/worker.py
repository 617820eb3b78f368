"""One measurement a line: JSON requests on standard input, JSON answers on standard output.

A worker loads its model once and then waits, so that the driver can let it and r3 take turns without paying for loading
again. By hand: `echo '{"batch": 64}' | python hf_decode.py --model DIR --dtype bf16`.
"""

import json
import os
import resource
import sys


def answers():
    """Standard output, for answers alone: what a library prints from now on goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def serve(measure, stream):
    """Answers each request with `measure(**request)`; a request that fails is answered with its error."""
    for line in sys.stdin:
        try:
            answer = measure(**json.loads(line))
        except Exception as error:  # the driver reports it, and goes on with the others
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=stream)


def peak_memory_bytes():
    """The most memory this process has held, as `getrusage` counts it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
