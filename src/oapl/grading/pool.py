"""Grading in worker processes: whatever an answer does to its worker, it costs that answer alone."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from oapl.errors import GradingError
from oapl.grading.worker import FunctionWorker


class WorkerPool:
    """Calls `module:function` in `num_workers` processes. A call that outlasts its limits ends its own process only.

    Any number of threads may call at once; those that find no worker free wait for one.
    """

    def __init__(
        self, function: str, num_workers: int, timeout_s: float, memory_bytes: int, timeout_setting: str
    ) -> None:
        self._workers = [FunctionWorker(function, timeout_s, memory_bytes, timeout_setting) for _ in range(num_workers)]
        self._free: queue.LifoQueue[FunctionWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grading")

    def start(self) -> None:
        """Starts every worker at once. Raises TaskError where the function cannot be imported."""
        for _ in self._threads.map(FunctionWorker.start, self._workers):
            pass

    def call(self, **arguments: Any) -> Any:
        """The function's result. Raises GradingError where it raises, outlasts its limits or ends its process."""
        with self._worker() as worker:
            return worker.call(**arguments)

    def map(self, calls: Iterable[Mapping[str, Any]]) -> list[Any]:
        """The results in the order of `calls`; a GradingError in place of the result of a call that raised it."""
        return list(self._threads.map(self._result, calls))

    def _result(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.call(**arguments)
        except GradingError as error:
            return error

    @contextmanager
    def _worker(self) -> Iterator[FunctionWorker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
