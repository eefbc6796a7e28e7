"""Work on a stack eight times as deep as the one that grammars were checked on (``text.grammar_sandbox``).

llguidance walks schemas by recursion, about 10 KB of stack a level, and overflowing a stack ends the process.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
_STACK_BYTES = 64 * 2**20
_starting = threading.Lock()


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, run in a thread of its own while the caller waits."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="nanoserve-deep-stack", daemon=True)
    with _starting:  # the size is the process's: a thread that others start right now gets it too, which is harmless
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return done.result()
