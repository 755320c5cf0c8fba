"""Where things are kept: on a disk, or in an object store through fsspec, asked with patience.

An `ObjectPath` has the part of pathlib's interface that the store uses.

An object is written whole or not at all, and what is written is read at once by everyone, as S3 and Google Cloud
Storage promise. Nothing is renamed in one go: a folder is moved object by object.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from oapl.errors import ConfigError, StoreError

PATIENCE_S = 600.0
"""Seconds for which a store that does not answer, or says that it cannot now, is asked again, from its first failure
on: the try itself may take longer."""
LONGEST_WAIT_S = 20.0
ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
PERMANENT = (*ANSWERS, PermissionError, ImportError, TypeError, ValueError, AttributeError, NotImplementedError)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Said by this machine, not by the store."""
PERMANENT_NUMBERS = (*DISK_FULL, errno.EACCES, errno.EPERM, errno.EINVAL)
CUT_SHORT = ("IncompleteBody", "BadDigest", "RequestTimeout")
"""What S3 answers where a connection was cut; s3fs gives these too the number of what is invalid."""
PERMANENT_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "DefaultCredentialsError")
"""Errors of the stores' own libraries that asking again does not mend."""

log = logging.getLogger(__name__)


class ObjectPath(PurePosixPath):
    """`s3://bucket/folder/name`, `gs://…`, or whatever fsspec knows by its protocol.

    Every call asks again, for up to PATIENCE_S, where the store does not answer. Raises StoreError after that, and
    where it refuses; OSError where this machine's disk is full.
    """

    __slots__ = ()

    @property
    def protocol(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """Bucket and name, as fsspec wants them."""
        return "/".join(self.parts[1:])

    @property
    def url(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        """Whether there is an object of that name, or one below it."""
        try:
            self._ask("info", self.key)
        except FileNotFoundError:
            return False
        return True

    def size(self) -> int:
        return int(self._ask("info", self.key)["size"])

    def is_file(self) -> bool:
        try:
            return bool(self._ask("info", self.key)["type"] == "file")
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        try:
            return bool(self._ask("info", self.key)["type"] == "directory")
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator[ObjectPath]:
        """What lies right below; nothing where there is nothing."""
        try:
            entries = self._ask("ls", self.key, detail=False)
        except FileNotFoundError:
            return
        for entry in entries:
            if (name := entry.rstrip("/").rpartition("/")[2]) and name != self.name:
                yield self / name

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Folder by folder."""
        first, _, rest = pattern.partition("/")
        found = (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, first))
        for path in sorted(found):
            yield from path.glob(rest) if rest else (path,)

    def read_bytes(self) -> bytes:
        data: bytes = self._ask("cat_file", self.key)
        return data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        self._ask("pipe_file", self.key, data)

    def create_bytes(self, data: bytes) -> bool:
        """Writes where there is nothing, as one process alone can; False where something else is."""
        try:
            self._ask("pipe_file", self.key, data, mode="create")
        except FileExistsError:
            return self.read_bytes() == data  # an answer may have been lost on the way
        return True

    def check_conditional_writes(self) -> None:
        """Raises ConfigError where what one process has created here, another could create again."""
        if self.protocol == "memory":
            raise ConfigError(f"{self}: only this process would see it. Use a folder, or an object store.")
        probe = self / f".probe-{uuid.uuid4().hex}"
        is_kept = False
        try:
            is_kept = probe.create_bytes(b"first") and not probe.create_bytes(b"second")
        except FileNotFoundError as error:
            raise ConfigError(f"{self}: there is no {self.parts[1]!r}. Create it, or correct the URL.") from error
        except StoreError as error:
            if not isinstance(error.__cause__, (TypeError, ValueError, NotImplementedError)):
                raise
        finally:
            with suppress(StoreError):
                probe.unlink(missing_ok=True)
        if not is_kept:
            raise ConfigError(
                f"{self}: {self.protocol}:// has no conditional writes here: two processes could both create one "
                f"object, and write over each other's work. Use a store that has them, such as s3:// or gs://, and the "
                f"newest package for it."
            )

    def upload(self, file: Path) -> bool:
        """Writes a file where there is nothing, a large one in parts; False where there is something."""
        try:
            self._ask("put_file", str(file), self.key, mode="create")
        except FileExistsError:
            return False
        return True

    def download(self, file: Path) -> None:
        self._ask("get_file", self.key, str(file))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask("rm_file", self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: ObjectPath) -> ObjectPath:
        """Object by object, its seals first, so that what is half moved counts as neither whole. What another process
        has moved meanwhile is passed over."""
        for source, goal in [(source, target / source.relative_to(self)) for source in self._objects()]:
            with suppress(FileNotFoundError):
                self._ask("cp_file", source.key, goal.key)
                source.unlink(missing_ok=True)
        return target

    def remove_all(self) -> None:
        for each in self._objects():
            each.unlink(missing_ok=True)

    def _objects(self) -> list[ObjectPath]:
        """This object, or all below it, JSON files such as seals first."""
        prefix = f"{self.protocol}://"
        paths = [ObjectPath(f"{prefix}{key.lstrip('/')}") for key in self._ask("find", self.key)]
        return sorted(paths, key=lambda path: (path.suffix != ".json", path))

    def resolve(self) -> ObjectPath:
        return self

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders are but the beginnings of names."""

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        call = getattr(filesystem(self.protocol), method)
        failures: list[float] = []

        def is_enough(_: RetryCallState) -> bool:
            failures.append(time.monotonic())
            return failures[-1] - failures[0] > PATIENCE_S

        retrying = Retrying(
            retry=retry_if_exception(is_passing),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT_S),
            stop=is_enough,
            before_sleep=self._tell,
            reraise=True,
        )
        try:
            return retrying(call, *args, **options)
        except ANSWERS:
            raise
        except Exception as error:
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            raise StoreError(
                f"{self}: the object store refuses `{method}`: {type(error).__name__}: {error}. Check the bucket, the "
                f"endpoint and this machine's credentials, and run the same command again: what was sealed is kept."
            ) from error

    def _tell(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        if state.attempt_number in (3, 6) or state.attempt_number % 10 == 0:
            log.warning("%s does not answer, and is asked again: %r", self, state.outcome.exception())


def is_passing(error: BaseException) -> bool:
    """Whether a call that failed so may succeed later."""
    answer = getattr(error.__cause__, "response", None) or {}
    if answer.get("Error", {}).get("Code") in CUT_SHORT:
        return True
    return (
        isinstance(error, Exception)
        and not isinstance(error, PERMANENT)
        and type(error).__name__ not in PERMANENT_NAMES
        and getattr(error, "errno", None) not in PERMANENT_NUMBERS
    )


@cache
def filesystem(protocol: str) -> Any:
    """fsspec's access to a kind of store, which remembers no listings: others write there too. Raises ConfigError where
    its library is missing."""
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{protocol}:// cannot be used here: {error}") from error


StorePath = Path | ObjectPath


def store_path(place: str | os.PathLike[str]) -> StorePath:
    """The path of a local folder, or of a URL. Raises ConfigError where the URL names no bucket."""
    if isinstance(place, ObjectPath):
        return place
    text = os.fspath(place)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if protocol == "file":
        return Path(rest)
    bucket = rest.partition("/")[0]
    if not bucket or "@" in bucket:
        raise ConfigError(f"{text!r} must be {protocol}://BUCKET/FOLDER; credentials come from the environment.")
    return ObjectPath(text)


def file_size(path: StorePath) -> int:
    """Bytes."""
    return path.size() if isinstance(path, ObjectPath) else path.stat().st_size


def folder_size(folder: StorePath) -> int:
    """Bytes of the files right in a folder."""
    return sum(file_size(path) for path in folder.iterdir() if path.is_file())


def poll_s(path: StorePath) -> float:
    """Seconds between two looks at a place: a store is a request away, and may charge for it."""
    return 0.02 if isinstance(path, Path) else 1.0


def cache_folder() -> Path:
    """Where copies of what lies in object stores are kept, and what processes print; OAPL_CACHE may name another."""
    return Path(os.environ.get("OAPL_CACHE") or Path.home() / ".cache" / "oapl")
