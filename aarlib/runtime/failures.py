"""What ends a training or a pass over the data: the ValueError behind the errors that Ray wraps it in, and Ctrl-C.

Ray Train's controller imports this module for `FailAtOnce`: it stays free of PyTorch and of the rest of the package.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray.train


def user_error(error: BaseException) -> BaseException:
    """The ValueError that one of our functions raised in a Ray process, without the remote traceback; else `error` itself."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen) is ValueError:
            return ValueError(str(seen))
        inner = (getattr(seen, name, None) for name in ("cause", "_base_exc", "controller_failure", "__cause__"))
        seen = next((error for error in inner if error is not None), None)
    return error


class FailAtOnce(ray.train.UserCallback):
    """Bad input stays bad input: a worker's ValueError ends the training, where a lost process would be started again."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        for error in map(user_error, worker_exceptions.values()):
            if type(error) is ValueError:
                raise error


def reason(error: ray.train.TrainingFailedError) -> BaseException:
    """The ValueError behind a failed training, else the failure itself."""
    failures = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", error)]
    return next((found for found in map(user_error, failures) if type(found) is ValueError), error)


@contextmanager
def interrupts_given_back() -> Iterator[None]:
    """Handlers of Ctrl-C that Ray Train and Tune set outlive what they were set for: they would swallow a later one, and Train's
    keeps its controller's processes."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
