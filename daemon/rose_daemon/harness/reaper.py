"""The last to leave: ends what is left of a stack when the process that ran it is gone, however it went.

`python -m rose_daemon.harness.reaper STACK_ID [DIRECTORY...]` waits for the end of its standard input, which
the kernel closes even when the owner was killed outright; then gives the stack's processes time to end by
themselves (their parent-death signal asked them to), kills the rest, and removes the scratch directories.
One byte on its input means that the owner stopped the stack in order: no time is given.
"""

from __future__ import annotations

import shutil
import signal
import sys

from rose_daemon.harness.marked import end_marked

GRACE_S = 20.0


def main(arguments: list[str]) -> int:
    """Wait, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stack_id, *directories = arguments
    grace = sys.stdin.buffer.read()
    end_marked(stack_id, 0.0 if grace else GRACE_S)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
