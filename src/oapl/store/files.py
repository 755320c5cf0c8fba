"""Writing so that a crash at any moment leaves the old bytes or the new ones, never part of either."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from oapl.errors import StoreError
from oapl.paths import ObjectPath, StorePath, cache_folder

NUM_COPIES = 4
"""Sealed folders of one kind and run, such as policies, of which a machine keeps copies."""
UPLOAD = "upload-"
"""How folders begin, in the cache folder, that are on their way into an object store."""
SEAL = "sealed.json"
"""Written last into whatever it seals, so its existence means complete."""

REMEDIES = {
    errno.ENOSPC: "The disk is full. Free some space and run the same command again",
    errno.EDQUOT: "The disk quota is used up. Free some space and run the same command again",
    errno.EFBIG: "The file would pass the size limit of this process or file system. Raise it and run again",
    errno.EROFS: "The file system is read-only. Make it writable or choose another run_dir",
    errno.EACCES: "This user may not write there. Change the permissions or choose another run_dir",
    errno.EPERM: "This user may not write there. Change the permissions or choose another run_dir",
}


@contextmanager
def storing(path: StorePath) -> Iterator[None]:
    """Turns what the operating system refuses into a StoreError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error_number(error)
        remedy = REMEDIES.get(number, "Check the run folder and run the same command again")
        raise StoreError(
            f"cannot write {path}: {os.strerror(number) if number else error}. {remedy}: "
            f"what was sealed so far is kept."
        ) from error


def error_number(error: Exception) -> int:
    """The operating system's number for what it refused, or 0. safetensors gives it in words alone."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else 0


def is_missing(error: StoreError) -> bool:
    """Whether it is one about what is not there, or no longer."""
    return isinstance(error.__cause__, FileNotFoundError)


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: StorePath, data: bytes) -> None:
    """Raises StoreError where the bytes cannot be written; the old ones then still stand."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    with storing(path):
        os.replace(write_partial(path, data), path)
        fsync(path.parent)


def write_partial(path: Path, data: bytes) -> Path:
    """The bytes under another name beside `path`, all of them on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")  # others may write the same file
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return partial


def create_bytes(path: StorePath, data: bytes) -> bool:
    """Writes a file where there is none, as one process alone can; False where there is one that holds something else.

    Raises StoreError where the bytes cannot be written.
    """
    if isinstance(path, ObjectPath):
        return path.create_bytes(data)
    with storing(path):
        partial = write_partial(path, data)
        try:
            os.link(partial, path)
        except FileExistsError:
            return path.read_bytes() == data
        finally:
            partial.unlink(missing_ok=True)
        fsync(path.parent)
    return True


def write_json(path: StorePath, value: Mapping[str, Any]) -> None:
    write_bytes(path, json_bytes(value))


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(path: StorePath, *keys: str) -> dict[str, Any]:
    """Raises StoreError where the file is not a JSON object that has all of `keys`."""
    return parse_json(path, read_bytes(path), *keys)


def read_bytes(path: StorePath) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def parse_json(path: StorePath, data: bytes, *keys: str) -> dict[str, Any]:
    """See `read_json`."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} should hold a JSON object, found {type(value).__name__}")
    if missing := [key for key in keys if key not in value]:
        raise StoreError(f"{path} lacks {', '.join(f'`{key}`' for key in missing)}. The file was altered")
    return value


def write_sealed_folder(
    folder: StorePath,
    facts: Mapping[str, Any],
    write: Callable[[Path], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Lets `write` fill a folder, then shows it under its name, whole, with `facts` and its digests in its seal.

    A folder of that name that has lost its seal is moved aside; in an object store, its files are replaced. `check` is
    called before whatever others will see, and raises where this process may write it no longer.
    """
    if isinstance(folder, ObjectPath):
        upload_sealed_folder(folder, facts, write, check)
        return
    partial = folder.with_name(f".{folder.name}.partial")
    with storing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        write(partial)
        files = files_in(partial)
        for path in files:
            fsync(path)
        write_json(partial / SEAL, {**facts, "files": {path.name: digest_file(path) for path in files}})
        check()
        if folder.exists():
            move_aside(folder)
        os.rename(partial, folder)
        fsync(folder.parent)


def upload_sealed_folder(
    folder: ObjectPath, facts: Mapping[str, Any], write: Callable[[Path], None], check: Callable[[], None]
) -> None:
    """Files first, the seal last. Nothing that is sealed is written over. Raises StoreError where another process has
    sealed the folder since."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with storing(folder), TemporaryDirectory(prefix=UPLOAD, dir=cache_folder()) as place:
        write(Path(place))
        files = files_in(Path(place))
        seal = {**facts, "files": {path.name: digest_file(path) for path in files}}
        for path in files:
            check()
            refuse_sealed(folder)
            while not (folder / path.name).upload(path):  # a killed upload's
                refuse_sealed(folder)
                (folder / path.name).unlink(missing_ok=True)
        check()
        if not create_bytes(folder / SEAL, json_bytes(seal)):
            refuse_sealed(folder)


def refuse_sealed(folder: ObjectPath) -> None:
    if (folder / SEAL).exists():
        raise StoreError(f"{folder} was sealed by another process meanwhile. Let one alone train the run.")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def local_folder(folder: StorePath) -> Path:
    """A sealed folder on this machine's disk: itself, or a verified copy, made once for all of the machine's processes.

    Raises StoreError where the copy's origin has no seal, or does not match it.
    """
    return folder if isinstance(folder, Path) else verified_folder(folder)[0]


def verified_folder(folder: StorePath) -> tuple[Path, dict[str, Any]]:
    """Where a sealed folder lies on this machine's disk, and its seal, each file read once to verify it.

    Raises StoreError that names the first file that is missing or altered.
    """
    if isinstance(folder, Path):
        return folder, verify_files(folder)
    data = read_bytes(folder / SEAL)
    seal = parse_json(folder / SEAL, data, "files")
    copies = cache_folder() / digest_bytes(str(folder.parent).encode())[:16]
    copy = copies / f"{folder.name}-{digest_bytes(data)[:16]}"
    with Lock(copies / f".{folder.name}.lock", "download", patience_s=math.inf):
        if (copy / SEAL).exists():
            with suppress(StoreError):
                return copy, verify_files(copy)
        shutil.rmtree(copy, ignore_errors=True)
        with storing(copy):
            copy.mkdir()
            for name in seal["files"]:
                try:
                    (folder / name).download(copy / name)
                except FileNotFoundError as error:
                    raise missing(folder, name) from error
        write_bytes(copy / SEAL, data)
        verify_files(copy)
        forget_old(copies)
    return copy, seal


def forget_old(copies: Path) -> None:
    """Removes all but the newest copies. A process that has one open keeps what it has."""
    folders = sorted((path for path in copies.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-NUM_COPIES]:
        shutil.rmtree(folder, ignore_errors=True)


def verify_sealed_folder(folder: StorePath) -> dict[str, Any]:
    """See `verified_folder`: the folder's seal."""
    return verified_folder(folder)[1]


def verify_files(folder: Path) -> dict[str, Any]:
    seal = read_json(folder / SEAL, "files")
    for name, digest in seal["files"].items():
        path = folder / name
        if not path.is_file():
            raise missing(folder, name)
        if (found := digest_file(path)) != digest:
            raise StoreError(
                f"{path} does not match its seal: SHA-256 {found[:12]}…, sealed as {digest[:12]}…. The file was altered"
            )
    return seal


def missing(folder: StorePath, name: str) -> StoreError:
    return StoreError(f"{folder / name} is missing, though {folder / SEAL} lists it")


def numbered_folders(parent: StorePath) -> list[int]:
    """The numbers of the folders in `parent` named by six digits or more, rising; anything else is ignored."""
    if isinstance(parent, Path) and not parent.is_dir():
        return []
    return sorted(int(path.name) for path in parent.iterdir() if re.fullmatch(r"\d{6,}", path.name))


def move_aside(path: StorePath) -> StorePath:
    """Renames what can no longer be used, so that nothing is lost and nothing reads it; returns its new name. Where
    another process is quicker, that is as good."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    try:
        rename(path, aside)
    except StoreError as error:
        if not is_missing(error):
            raise
    return aside


def rename(path: StorePath, target: StorePath) -> None:
    """A file or folder; a file takes the place of one of that name."""
    with storing(path):
        if isinstance(path, ObjectPath) and isinstance(target, ObjectPath):
            path.rename(target)
        else:
            os.rename(path, target)
            fsync(Path(path).parent)


def remove_folder(folder: StorePath) -> None:
    with storing(folder):
        if isinstance(folder, ObjectPath):
            folder.remove_all()
        elif folder.exists():
            shutil.rmtree(folder)


class Lock:
    """One holder of a role on a run folder at a time; the system lets go when the holder dies."""

    def __init__(
        self, path: Path, role: str, patience_s: float = 5.0, setting: str = "run_dir", of: Path | None = None
    ) -> None:
        self.path, self.role, self.patience_s, self.setting = path, role, patience_s, setting
        self.of = of or path.parent

    def __enter__(self) -> Lock:
        if self.path.parent.is_file():
            raise StoreError(f"{self.path.parent} is a file, and not a folder. Choose another {self.setting}.")
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+")
        give_up = time.monotonic() + self.patience_s
        while not self._try():
            if time.monotonic() > give_up:
                self._file.seek(0)
                holder = self._file.read().strip() or "unknown"
                self._file.close()
                raise StoreError(
                    f"{self.of} already has a {self.role} at work (process {holder}). "
                    f"Wait for it to end, stop it, or choose another {self.setting}."
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return self

    def is_lost(self) -> bool:
        return False

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self._file.close()
