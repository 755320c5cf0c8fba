"""metrics.jsonl as columns, read on from where the last look ended."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAIL_BYTES = 65_536


class Metrics:
    """The numbers of every step, one row a step; of a step done again, the last line. For one thread."""

    def __init__(self, path: Path, version: int = 0) -> None:
        self._path = path
        self.version = version
        """Grows with each line, and where all is read anew."""
        self._forget()

    def _forget(self) -> None:
        self.version += 1
        self._inode = self._offset = 0
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Takes in what was written since; a line that is still being written is left for the next time."""
        try:
            with open(self._path, "rb") as file:
                self._read(file)
        except FileNotFoundError:
            if self._offset:
                self._forget()

    def _read(self, file: Any) -> None:
        status = os.fstat(file.fileno())
        if self._offset and (status.st_ino != self._inode or status.st_size < self._offset):
            self._forget()
        self._inode = status.st_ino
        file.seek(self._offset)
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self._add(json.loads(line))

    def _add(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        record = {**record, "step": step}
        row = self._row_of.setdefault(step, len(self._row_of))
        self.version += 1
        for name in record.keys() - self._columns.keys():
            if isinstance(record[name], int | float):
                self._columns[name] = array("d", [math.nan]) * len(self._row_of)
        for name, values in self._columns.items():
            value = record.get(name, math.nan)
            number = value if isinstance(value, int | float) else math.nan
            if row < len(values):
                values[row] = number
            else:
                values.append(number)

    def __len__(self) -> int:
        return len(self._row_of)

    def column(self, name: str, absent: float = math.nan) -> NDArray[np.float64]:
        """f64[steps]; `absent` where a step lacks it or it is not finite."""
        if name not in self._columns:
            return np.full(len(self._row_of), absent)
        values = np.array(self._columns[name], np.float64)
        return np.where(np.isfinite(values), values, absent)

    def last(self, count: int) -> list[dict[str, float]]:
        """Records of the last rows, in order, without what is not finite."""
        first = max(0, len(self._row_of) - count)
        return [
            {name: values[row] for name, values in self._columns.items() if math.isfinite(values[row])}
            for row in range(first, len(self._row_of))
        ]


def last_record(path: Path) -> dict[str, Any] | None:
    """That of the last whole line, without reading the rest; None where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    return next(records(reversed(lines)), None)


def records(lines: Iterable[bytes]) -> Any:
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record
