"""Grammars are compiled for the first time in a process of their own: a schema or regex that overflows the library's
stack or never ends costs that process and a refusal, not the door and its streams.

What passes here is compiled again by an engine, on a deeper stack (``model.grammar``). ``python -m`` of this module,
with a socket's file descriptor, is that process.
"""

import contextlib
import resource
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

CHECK_CPU_S = 1.0
_STACK_BYTES = 8 * 2**20
_MEMORY_BYTES = 4 * 2**30


class GrammarSandbox:
    """Owns the process: made on first use, and again after a grammar that ended it. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def fault(self, text: str) -> str | None:
        """Why ``text`` is no usable grammar; None when it is one."""
        with self._lock:
            process, pipe = self._running()
            try:
                pipe.send_bytes(text.encode())
                return pipe.recv_bytes().decode() or None
            except (EOFError, OSError):
                self._process = None
                pipe.close()
                if process.wait() == -signal.SIGPROF:
                    return f"compiling it takes more than {CHECK_CPU_S:g} s"
                return "it is nested too deeply, or needs too much memory"

    def _running(self) -> tuple[subprocess.Popen[bytes], Connection]:
        if self._process is None or self._pipe is None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
                self._pipe = Connection(ours.detach())
        return self._process, self._pipe


def _serve(pipe: Connection) -> None:
    """Answers each grammar with what is wrong with it, in words; empty for nothing. Ends with the door."""
    from llguidance import LLMatcher

    try:
        while True:
            text = pipe.recv_bytes().decode()
            signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S)  # CPU time; the signal that follows it ends the process
            answer = LLMatcher.validate_grammar(text).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer)
    except (EOFError, OSError):
        return


def main() -> None:
    """Serves on the file descriptor that is the argument, within bounds on memory and stack."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # the system allows less already, or has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)  # the main thread's own depends on the machine
    thread = threading.Thread(target=_serve, args=[Connection(int(sys.argv[1]))])
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
