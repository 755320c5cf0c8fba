"""What can be asked of a run's completions at once: their light columns, in a DuckDB outside of the run.

A run of a million completions lies in thousands of Parquet files, too many to open for each question. A thread reads
the light columns of every sealed shard once, newest rounds first, and goes on as shards are sealed. Texts stay where
they are; a search reads them, newest first, for as long as it is given.
"""

from __future__ import annotations

import glob
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import duckdb

from oapl.errors import ConfigError, StoreError
from oapl.store import RunFolder
from oapl.store.files import numbered_folders
from oapl.store.rounds import parquet_of
from oapl.view.runs import real_inside

BATCH = 32
"""Shards that are read at once."""
POLL_S = 0.5
"""Seconds between two looks for new shards."""
IDLE_S = 60.0
"""Seconds after the last question at which looking ends, until the next."""
PAGE = 50
"""Completions that one answer holds, but for those of a shard that are found together."""
SEARCH_S = 0.6
"""Seconds that one search reads for."""
CLOSE_S = 5.0
"""Seconds that closing waits for the thread."""
MAX_NOTES = 20
MAX_SEAL = 16_000_000
"""Bytes of a seal that are read."""
SETTLED_NS = 3_000_000_000
"""A folder that was changed longer ago than this shows every later change in its time."""

Order = Literal["newest", "likely", "rare", "longest", "best", "worst"]
ORDERS: dict[Order, str] = {
    "newest": "round DESC, shard DESC, position, idx",
    "likely": "mean_logprob DESC",
    "rare": "mean_logprob",
    "longest": "length DESC",
    "best": "reward DESC NULLS LAST",
    "worst": "reward NULLS LAST",
}
"""Ties are broken by `newest`."""
Verdict = Literal["", "right", "wrong", "failed"]

SCHEMA = """
CREATE TABLE completions (
    round INTEGER, shard INTEGER, position INTEGER, idx INTEGER, prompt_id VARCHAR, reward FLOAT, is_right BOOLEAN,
    finish VARCHAR, length INTEGER, logprob FLOAT, mean_logprob FLOAT
);
CREATE TABLE failed (round INTEGER, shard INTEGER, position INTEGER, prompt_id VARCHAR, cause VARCHAR);
"""
COLUMNS = "round, shard, position, idx, prompt_id, reward, is_right, finish, length, logprob, mean_logprob"
READ = """
INSERT INTO completions BY NAME SELECT
    CAST(regexp_extract(filename, '(\\d+)/[^/]*$', 1) AS INTEGER) AS round,
    CAST(regexp_extract(filename, 'groups-(\\d+)[^/]*$', 1) AS INTEGER) AS shard,
    position, "index" AS idx, prompt_id, reward, {mark} >= CAST($threshold AS FLOAT) AS is_right,
    finish_reason AS finish, len(token_ids) AS length, list_sum(logprobs) AS logprob, list_avg(logprobs) AS mean_logprob
FROM read_parquet($files, filename = true, union_by_name = true, hive_partitioning = false)
"""
HITS = """
SELECT CAST(regexp_extract(filename, '(\\d+)/[^/]*$', 1) AS INTEGER) AS round, position, "index" AS idx
FROM read_parquet($files, filename = true, union_by_name = true, hive_partitioning = false)
WHERE contains(lower(completion), lower($text)) OR contains(lower(prompt), lower($text))
"""
Shard = tuple[int, int]
"""Its round, and its number there."""


@dataclass(frozen=True)
class Filters:
    """Which completions are asked for, and in which order. Raises ConfigError where a value is none of those known."""

    verdict: Verdict = ""
    finish: str = ""
    prompt: str = ""
    """A prompt's whole id."""
    text: str = ""
    """Stands in the completion or its prompt, in whatever case."""
    first_round: int | None = None
    last_round: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    order: Order = "newest"

    def __post_init__(self) -> None:
        for name, known in (
            ("verdict", get_args(Verdict)),
            ("order", get_args(Order)),
            ("finish", ("", "stop", "length")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is one of {', '.join(filter(None, known))}, not {getattr(self, name)!r}.")

    def where(self) -> tuple[str, dict[str, Any]]:
        """As SQL, but for `text`, and its values. Groups that failed have no more than a round and a prompt."""
        given: list[tuple[str, str, Any]] = [
            ("prompt", "prompt_id = $prompt", self.prompt or None),
            ("first_round", "round >= $first_round", self.first_round),
            ("last_round", "round <= $last_round", self.last_round),
        ]
        if self.verdict != "failed":
            given += [
                ("finish", "finish = $finish", self.finish or None),
                ("least_reward", "reward >= CAST($least_reward AS FLOAT)", self.least_reward),
                ("most_reward", "reward <= CAST($most_reward AS FLOAT)", self.most_reward),
                ("verdict", "is_right = $verdict", {"right": True, "wrong": False}.get(self.verdict)),
            ]
        known = [each for each in given if each[2] is not None]
        return " AND ".join(sql for _, sql, _ in known) or "true", {name: value for name, _, value in known}


@dataclass
class Progress:
    """How far the index is."""

    is_whole: bool = False
    """Whether every round was looked at once, so that `num_sealed` counts all of them."""
    num_sealed: int = 0
    """Shards that were found sealed."""
    num_read: int = 0
    version: int = 0
    """Grows with each change."""
    notes: list[str] = field(default_factory=list)
    """Damage."""


class Index:
    """The index of one run; `folder` is where its database lies, which must not be the run's."""

    def __init__(self, run: RunFolder, threshold: float, judged_by: str | None, folder: Path, version: int = 0) -> None:
        self._run, self._threshold, self._judged_by = run, threshold, judged_by
        self._root = Path(run.path).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._database = duckdb.connect(
            str(folder / "index.duckdb"),
            config={
                "threads": 1,
                "memory_limit": "1GB",
                "temp_directory": str(folder / "spilled"),
                "autoinstall_known_extensions": False,
                "autoload_known_extensions": False,
            },
        )
        self._database.execute(SCHEMA)
        self._seen_folders: dict[int, tuple[int, int]] = {}
        """Inode and time of change of each round's folder, as of the last look."""
        self._seals: dict[Shard, tuple[int, int, int]] = {}
        self._files: dict[Shard, str] = {}
        """Of the shards that are read."""
        self.progress = Progress(version=version)
        self._asked_at = time.monotonic()
        self._asked, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="oapl-view-index", daemon=True)
        self._thread.start()

    # Keeping up

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                self.update()
            except Exception as error:  # a disk that is full, a run that is being removed; the next look may do better
                self._note(f"The index cannot be kept up now: {first_line(error)}")
            self._closed.wait(POLL_S)
            if time.monotonic() - self._asked_at > IDLE_S:
                self._asked.clear()
                self._asked.wait()

    def ask(self) -> None:
        """Says that somebody looks."""
        self._asked_at = time.monotonic()
        self._asked.set()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # it may wait for a file system that does not answer
            self._database.close()

    def update(self) -> None:
        """Takes in what was sealed, moved aside or sealed again since the last time."""
        cursor = self._database.cursor()
        wanted: list[tuple[Shard, tuple[int, int, int]]] = []
        indices = numbered_folders(self._run.path / "rounds")
        for index in set(self._seen_folders).difference(indices):
            self._look(index, cursor)
        for index in reversed(indices):
            wanted += self._look(index, cursor)
            if wanted and not self._seals:  # the first thing that somebody wants to see
                self._read(dict(wanted[:BATCH]), cursor)
                wanted = wanted[BATCH:]
        self.progress.num_sealed = len(self._seals) + len(wanted)
        self.progress.is_whole = True
        for start in range(0, len(wanted), BATCH):
            if self._closed.is_set():
                return
            self._read(dict(wanted[start : start + BATCH]), cursor)

    def _look(self, index: int, cursor: duckdb.DuckDBPyConnection) -> list[tuple[Shard, tuple[int, int, int]]]:
        """The shards of a round that are to be read, newest first; those that are gone or changed are forgotten."""
        folder = Path(self._run.round(index).path)
        try:
            status = folder.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if self._seen_folders.get(index) == stamp:
                return []
            with os.scandir(folder) as entries:
                names = [entry for entry in entries if re.fullmatch(r"groups-\d{5}\.json", entry.name)]
                stats = {int(entry.name[7:12]): entry.stat() for entry in names}
        except OSError:  # moved aside, or pruned
            stamp, stats = None, {}
        found = {(index, number): (s.st_ino, s.st_mtime_ns, s.st_size) for number, s in stats.items()}
        for shard in [shard for shard, seal in self._seals.items() if shard[0] == index and found.get(shard) != seal]:
            self._forget(shard, cursor)
        new = [(shard, seal) for shard, seal in sorted(found.items(), reverse=True) if shard not in self._seals]
        if stamp is None:
            self._seen_folders.pop(index, None)
        elif not new and time.time_ns() - stamp[1] > SETTLED_NS:
            self._seen_folders[index] = stamp
        return new

    def _forget(self, shard: Shard, cursor: duckdb.DuckDBPyConnection) -> None:
        for table in ("completions", "failed"):
            cursor.execute(f"DELETE FROM {table} WHERE round = ? AND shard = ?", shard)
        self._seals.pop(shard, None)
        self._files.pop(shard, None)
        self.progress.num_read = len(self._seals)
        self.progress.version += 1

    def _read(self, seals: Mapping[Shard, tuple[int, int, int]], cursor: duckdb.DuckDBPyConnection) -> None:
        files: dict[Shard, str] = {}
        failed: dict[Shard, list[tuple[Any, ...]]] = {}
        for index, number in seals:
            folder = self._run.round(index)
            try:
                if self._inside(folder.seal_path(number)).stat().st_size > MAX_SEAL:
                    raise StoreError(f"its seal has more than {MAX_SEAL:,} bytes")
                seal = folder.shard_seal(number)
                path = str(self._inside(parquet_of(folder.seal_path(number))))
                failed[index, number] = [(index, number, *failed_facts(each)) for each in seal["failed"]]
                files[index, number] = path
            except Exception as error:  # whatever a file can hold
                self._leave_out((index, number), error)
        try:
            self._insert(files, failed, cursor)
        except duckdb.Error:  # one of them is damaged
            for shard in list(files):
                try:
                    self._insert({shard: files[shard]}, failed, cursor)
                except duckdb.Error as error:
                    del files[shard]
                    self._leave_out(shard, error)
        self._files.update(files)
        self._seals.update(seals)
        self.progress.num_read = len(self._seals)
        self.progress.num_sealed = max(self.progress.num_sealed, len(self._seals))
        self.progress.version += 1

    def _insert(
        self,
        files: Mapping[Shard, str],
        failed: Mapping[Shard, Sequence[tuple[Any, ...]]],
        cursor: duckdb.DuckDBPyConnection,
    ) -> None:
        """Takes in all of these shards, or raises duckdb.Error and none."""
        if not files:
            return
        mark = "reward"
        values: dict[str, Any] = {"threshold": self._threshold, "files": patterns(files.values())}
        if self._judged_by is not None:
            mark = "CASE WHEN reward IS NOT NULL THEN coalesce(map_extract_value(scores, $judge), 0) END"
            values["judge"] = self._judged_by
        rows = [row for shard in files for row in failed[shard]]
        cursor.begin()
        try:
            cursor.execute(READ.format(mark=mark), values)
            if rows:
                cursor.executemany("INSERT INTO failed VALUES (?, ?, ?, ?, ?)", rows)
            cursor.commit()
        except BaseException:
            with suppress(duckdb.Error):  # where the commit failed there is nothing to take back
                cursor.rollback()
            raise

    def _leave_out(self, shard: Shard, error: Exception) -> None:
        self._note(f"Shard {shard[1]} of round {shard[0]} is left out: {first_line(error)}")

    def _inside(self, path: Any) -> Path:
        """The file itself. Raises StoreError where it lies outside of the run, or is none: a pipe never ends."""
        real = real_inside(Path(path), self._root)
        if not real.is_file():
            raise StoreError(f"{path} is no file")
        return real

    def _note(self, note: str) -> None:
        if note not in self.progress.notes and len(self.progress.notes) < MAX_NOTES:
            self.progress.notes.append(note)

    # Questions

    def page(self, filters: Filters, offset: int = 0) -> dict[str, Any]:
        """PAGE completions (or failed groups) from `offset` on, with the beginning of their texts, and how many there
        are in all. `filters.text` is not looked at."""
        where, values = filters.where()
        if filters.verdict == "failed":
            table, columns, order = (
                "failed",
                "round, shard, position, prompt_id, cause",
                "round DESC, shard DESC, position",
            )
        else:
            table, columns = "completions", COLUMNS
            order = ", ".join(dict.fromkeys((ORDERS[filters.order], ORDERS["newest"])))
        cursor = self._database.cursor()
        (total,) = cursor.execute(f"SELECT count(*) FROM {table} WHERE {where}", values).fetchone() or (0,)
        rows = fetch(
            cursor.execute(
                f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order} LIMIT {PAGE} OFFSET $offset",
                {**values, "offset": offset},
            )
        )
        self._add_texts(rows, cursor)
        return {"rows": rows, "total": total, "offset": offset}

    def search(self, filters: Filters, before: Shard | None = None, seconds: float = SEARCH_S) -> dict[str, Any]:
        """Completions whose text has `filters.text`, newest shards first, from those older than `before` on: all of a
        shard or none, PAGE of them or some more, within about so many seconds.

        `before` in the answer is where to go on, None at the end; `searched` of the `shards` that the other filters
        leave were read.
        """
        end = time.monotonic() + seconds
        where, values = filters.where()
        cursor = self._database.cursor()
        shards: list[Shard] = sorted(self._files.copy(), reverse=True)  # the thread adds to it
        if values or where != "true":
            sql = f"SELECT DISTINCT round, shard FROM completions WHERE {where} ORDER BY round DESC, shard DESC"
            shards = cursor.execute(sql, values).fetchall()
        start = begun = 0 if before is None else sum(shard >= before for shard in shards)
        rows: list[dict[str, Any]] = []
        size = 4
        while start < len(shards) and len(rows) < PAGE and (start == begun or time.monotonic() < end):
            part = shards[start : start + size]
            found = self._matches(part, filters.text, where, values, cursor)
            rows += found
            if len(rows) > PAGE:  # leave out what is older than the shard that fills the page
                last = (rows[PAGE - 1]["round"], rows[PAGE - 1]["shard"])
                rows = [row for row in rows if (row["round"], row["shard"]) >= last]
                part = part[: part.index(last) + 1] if last in part else part
            start += len(part)
            size = min(2 * size, 128)
        self._add_texts(rows, cursor, filters.text)
        more = start < len(shards)
        return {
            "rows": rows,
            "searched": start,
            "shards": len(shards),
            "before": list(shards[start - 1]) if more and start > 0 else None,
        }

    def _matches(
        self, shards: Sequence[Shard], text: str, where: str, values: Mapping[str, Any], cursor: Any
    ) -> list[dict[str, Any]]:
        files = {shard: self._files[shard] for shard in shards if shard in self._files}
        if not files:
            return []
        try:
            hits = cursor.execute(HITS, {"text": text, "files": patterns(files.values())}).fetchall()
        except duckdb.Error:
            if len(files) == 1:  # damaged since it was read, or gone
                return []
            return [row for shard in shards for row in self._matches([shard], text, where, values, cursor)]
        if not hits:
            return []
        sql = (
            "WITH hits AS (SELECT unnest($r) AS round, unnest($p) AS position, unnest($i) AS idx) "
            f"SELECT {COLUMNS} FROM completions JOIN hits USING (round, position, idx) "
            f"WHERE {where} AND round BETWEEN $low AND $high ORDER BY {ORDERS['newest']}"
        )
        r, p, i = (list(each) for each in zip(*hits, strict=True))
        return fetch(cursor.execute(sql, {**values, "r": r, "p": p, "i": i, "low": min(r), "high": max(r)}))

    def _add_texts(self, rows: Sequence[dict[str, Any]], cursor: Any, around: str = "", length: int = 160) -> None:
        """Puts the beginning of each text into its row, or the part around what was searched for."""
        wanted = {(row["round"], row["shard"]) for row in rows if "idx" in row}
        files = [self._files[shard] for shard in wanted if shard in self._files]
        if not files:
            return
        start = "greatest(1, position(lower($around) IN lower(completion)) - 40)" if around else "1"
        sql = f"""
            SELECT CAST(regexp_extract(filename, '(\\d+)/[^/]*$', 1) AS INTEGER), position, "index",
                substring(completion, {start}, {length})
            FROM read_parquet($files, filename = true, union_by_name = true, hive_partitioning = false)
            WHERE position IN (SELECT unnest($positions))
        """
        values: dict[str, Any] = {"files": patterns(files), "positions": sorted({row["position"] for row in rows})}
        with suppress(duckdb.Error):
            texts = {
                (round, position, idx): text
                for round, position, idx, text in cursor.execute(
                    sql, {**values, **({"around": around} if around else {})}
                ).fetchall()
            }
            for row in rows:
                row["text"] = texts.get((row["round"], row["position"], row.get("idx")), "")


def failed_facts(failed: Any) -> tuple[int, str, str]:
    """What a seal says of a group that could not be graded. Raises StoreError where it is of another kind."""
    position, prompt_id, cause = failed["position"], failed["prompt_id"], failed["cause"]
    if not (type(position) is int and 0 <= position < 2**31 and isinstance(prompt_id, str) and isinstance(cause, str)):
        raise StoreError(f"its seal has no position, prompt_id and cause in {str(failed)[:200]}")
    return position, prompt_id, cause


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def patterns(files: Any) -> list[str]:
    """File names for DuckDB, which takes some characters in them for a pattern's."""
    return [glob.escape(file) for file in files]


def fetch(result: Any) -> list[dict[str, Any]]:
    names = [column[0] for column in result.description]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
