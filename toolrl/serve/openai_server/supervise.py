"""Runs vLLM's server, and fails if it ends unasked: after the death of its engine it shuts down with exit code 0.

    python supervise.py [--ready URL TEXT] COMMAND ..

The text is printed once the URL answers.
Signals go to the server, but for those that are ignored here, as nohup does. If this process is killed, the server
ends, too.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from types import FrameType

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0
_PRINT_S = 9.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def announce(url: str, text: str) -> None:
    """Print the text as soon as a request to the URL succeeds, and until then that it starts, every few seconds.

    Never returns before; the process may end meanwhile.
    """
    started = printed = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=_POLL_S):
                break
        except OSError:  # also answers of another status
            time.sleep(_POLL_S)
        if (now := time.monotonic()) - printed >= _PRINT_S:
            printed = now
            sys.stdout.write(f"the server starts ({now - started:.0f} s)\n")
            sys.stdout.flush()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def supervise(command: Sequence[str], ready: Sequence[str] = ()) -> int:
    """The exit code of the command. 1: it ended with 0, but without a signal. Over 128: it failed after that signal.

    ready: a URL, and the text that is printed once it answers
    """
    asked: list[int] = []
    parent = os.getpid()
    heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until there is a process to send them to
    # A group of its own: Ctrl-C in a terminal reaches it once, from here.
    process = subprocess.Popen(command, process_group=0, preexec_fn=begin)
    if ready:
        threading.Thread(target=announce, args=ready, daemon=True).start()

    def forward(number: int, _: FrameType | None) -> None:
        asked.append(number)
        process.send_signal(number)

    for number in heeded:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    code = process.wait()
    if asked:
        return 128 + asked[0] if code else 0  # vLLM raises errors of its own while it starts
    if code == 0:
        sys.stderr.write("the server ended without a signal: see its errors above\n")
        return 1
    return 128 - code if code < 0 else code


def main(argv: Sequence[str]) -> int:
    if argv[0] == "--ready":
        return supervise(argv[3:], argv[1:3])
    return supervise(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
