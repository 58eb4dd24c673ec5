"""The process in which :mod:`.optimal_solver` has programs solved. Run as a file: it imports nothing of gistkit's."""

import os
import pickle
import signal
import sys


def main() -> None:
    """Solve what comes on standard input (the path to import from, then arguments of scipy's milp) until it ends, and
    answer on standard output, where nothing else is written."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who asks; without that the input ends
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.path[:] = pickle.load(requests)
    from scipy.optimize import milp

    while True:
        try:
            words = pickle.load(requests)
        except EOFError:
            return
        found = milp(**words)
        pickle.dump((found.status, found.x, found.fun, getattr(found, "mip_dual_bound", None)), replies)
        replies.flush()


if __name__ == "__main__":
    main()
