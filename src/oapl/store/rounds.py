"""A round on disk: `round.json`, one Parquet file and one seal a shard, and `sealed.json` once all shards are in.

An evaluation is stored the same way: a round whose prompts are held out and that nothing trains on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from oapl.errors import StoreError
from oapl.paths import StorePath, store_path
from oapl.store.files import (
    SEAL,
    create_bytes,
    digest_bytes,
    is_missing,
    json_bytes,
    move_aside,
    read_json,
    rename,
    write_bytes,
    write_json,
)
from oapl.types import (
    Completion,
    Draft,
    FailedGroup,
    Group,
    PolicyRef,
    Round,
    SampledGroup,
    SamplingParams,
    Shard,
    Verdict,
)

SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("position", pa.int32()),
        ("prompt_id", pa.string()),
        ("index", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float32()),
        ("answer", pa.string()),
        ("reason", pa.string()),
        ("scores", pa.map_(pa.string(), pa.float32())),
        ("finish_reason", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_version", pa.int32()),
        ("policy_digest", pa.string()),
        ("temperature", pa.float32()),
        ("max_completion_length", pa.int32()),
        ("seed", pa.int64()),
        ("verifier", pa.string()),
    ]
)
"""One row a completion; docs/store.md explains the columns."""
OTHER_REWARDS = pa.field("other_rewards", pa.list_(pa.float32()))
"""A column that is there where a group has some."""

ADOPTING = "adopting.json"
"""The round as it will be, while new verdicts take the place of the old."""
NOT_GRADED = "it was not graded yet"
IMPORTED = "imported.json"
"""Marks a round that another run sampled, or that files were made into, and says which."""

SHARD_FACTS = (
    "digest",
    "num_groups",
    "num_completions",
    "num_tokens",
    "sampling_s",
    "grading_s",
    "mismatch",
    "failed",
)
"""What a shard's seal says."""


class RoundFolder:
    """The files of one round. A sampler fills it, or it is copied from another run or made of others' files."""

    def __init__(self, path: StorePath) -> None:
        self.path = path

    def open(self, round: Round) -> None:
        """Describes the round, in place of what may be described already."""
        write_json(self.path / "round.json", asdict(round))

    def open_once(self, round: Round) -> Round:
        """Describes the round, unless another sampler has by now; returns what is described."""
        create_bytes(self.path / "round.json", json_bytes(asdict(round)))
        return self.load()

    def is_open(self) -> bool:
        return (self.path / "round.json").exists()

    def is_begun(self) -> bool:
        """Whether there is anything of a round, be its description lost."""
        return self.is_open() or bool(self.stored_shards())

    def load(self) -> Round:
        return round_from(self.path / "round.json")

    def is_of(self, policy: PolicyRef | None) -> bool:
        """Whether the round is that policy's (any, where the policy is gone), or was brought in from elsewhere."""
        return self.is_imported() or policy in (None, self.load().policy)

    def is_imported(self) -> bool:
        return (self.path / IMPORTED).exists()

    def source(self) -> RoundFolder | None:
        """The round of another run that this one was copied from; None where it was sampled here, or made of files."""
        source = read_json(self.path / IMPORTED).get("from") if self.is_imported() else None
        return None if source is None else RoundFolder(store_path(source))

    def write_imported(self, round: Round, shards: Sequence[Shard], origin: Mapping[str, Any]) -> None:
        """Stores and seals a round whose shards were made of others' files; `origin` says which and how."""
        write_json(self.path / IMPORTED, origin)
        self.open(round)
        for number, shard in enumerate(shards):
            self.write_shard(round, number, shard)
        self.seal(round)

    def import_from(self, source: RoundFolder) -> None:
        """Copies the sealed round of another run, or what of it is missing here.

        Raises StoreError where it is damaged, or is not the round that was begun to be copied before.
        """
        round = source.load()
        if not self.is_open():
            write_json(self.path / IMPORTED, {"from": str(source.path.resolve())})
            self.open(round)
        elif self.load() != round:
            raise StoreError(
                f"{self.path} was copied from another round than {source.path} holds now. Restore launch.rounds_from, "
                f"or start a new run_dir."
            )
        for number in range(round.num_shards):
            if not self.has_shard(number):
                source.read_shard(number)
                write_bytes(self.parquet_path(number), source.parquet_path(number).read_bytes())
                write_json(
                    self.seal_path(number), {**source.shard_seal(number), "file": self.parquet_path(number).name}
                )
        if not self.is_sealed():
            self.seal(round)

    def parquet_path(self, shard: int) -> StorePath:
        """The file that a stored shard's seal names."""
        return parquet_of(self.seal_path(shard))

    def seal_path(self, shard: int) -> StorePath:
        return self._paths("groups", shard)[1]

    def has_shard(self, shard: int) -> bool:
        return self.seal_path(shard).exists()

    def stored_shards(self) -> list[int]:
        """The numbers of the shards that are in, rising."""
        return sorted(int(path.stem.removeprefix("groups-")) for path in self.path.glob("groups-?????.json"))

    def write_shard(self, round: Round, number: int, shard: Shard) -> bool:
        """Stores the groups, those that could not be graded among them, then the seal that makes them count.

        False where another sampler has stored the shard by now: then that one stands, and this one leaves no trace.
        """
        data = shard_bytes(round, shard)
        path, seal = self._paths("groups", number)
        if not create_bytes(path, data):  # another sampler's, who is late, or has died before its seal
            path = path.with_name(f"{path.stem}-{digest_bytes(data)[:12]}{path.suffix}")
            write_bytes(path, data)
        won = create_bytes(seal, json_bytes({**shard_facts(round, shard, data), "file": path.name}))
        if won and not path.exists():  # another, whose seal stood then and was set aside since, took it for a leftover
            write_bytes(path, data)
        with suppress(StoreError):  # of a shard that is set aside by now, nobody knows which file counts
            for other in self.path.glob(f"groups-{number:05d}*.parquet"):
                if other.name != read_json(seal, "file")["file"]:
                    other.unlink(missing_ok=True)
        return won

    def write_draft(self, round: Round, first: int, draft: Draft) -> None:
        """Keeps what was sampled for the shards from `first` on, until they are graded and stored."""
        waiting = (FailedGroup(group.position, group.prompt_id, NOT_GRADED, group) for group in draft.sampled)
        shard = Shard((), (*waiting, *draft.unsampled), draft.sampling_s, 0.0, draft.mismatch)
        self._write("draft", first, round, shard)

    def read_drafts(self, round: Round) -> dict[int, Draft]:
        """All drafts that are whole, by the shard they begin with. A damaged one is as good as none, and so is one of
        other weights, whose sampler was late for a round that was moved aside."""
        drafts = {}
        for seal in self.path.glob("draft-?????.json"):
            with suppress(StoreError):
                if is_of_policy(round, read_json(seal)):
                    first = int(seal.stem.removeprefix("draft-"))
                    drafts[first] = read_shard(seal).without_verdicts()
        return drafts

    def remove_draft(self, first: int) -> None:
        for path in reversed(self._paths("draft", first)):  # the seal first, without which the other counts for nothing
            path.unlink(missing_ok=True)

    def check_planned(self, round: Round) -> None:
        """Raises StoreError where the folder holds a round of other problems, prompts or sampling than `round`. Who
        grades it may differ."""
        stored = self.load()
        if stored == replace(
            round, verifier=stored.verifier, gold=stored.gold, problems=stored.problems and round.problems
        ):
            return
        before, now = vars(stored.sampling), vars(round.sampling)
        changed = [f"{name} {value} and not {now[name]}" for name, value in before.items() if value != now[name]]
        what = f"settings of sampling ({', '.join(changed)})" if changed else "prompts or seed"
        if stored.policy != round.policy:
            what = f"weights ({stored.policy.digest[:12]}…)"
        elif stored.problems and stored.problems != round.problems:
            what = "problems or prompts"
        raise StoreError(
            f"{self.path} holds a round that was planned with other {what} than asked for now. Use the same, or "
            f"another run_dir or output_dir."
        )

    def is_judged_otherwise(self, round: Round) -> bool:
        """Whether some of the verdicts here are another grader's, or were given by other answers, than the round's."""
        facts = [self.shard_seal(number) for number in self.stored_shards()]
        if self.is_open():
            facts.append(vars(self.load()))
        return not all(is_judged_as(round, each) for each in facts)

    def prepare(self, round: Round) -> str | None:
        """Makes way for a round that scores weights, so that one grader judges all of it: other weights' answers are
        moved aside, other verdicts taken back. One process does this, before its samplers start. Returns what was done.

        Raises StoreError where the answers here are to other problems, or were sampled otherwise.
        """
        self.finish_adopting()
        if self.is_open():
            if self.load().policy != round.policy:
                return f"{self.path} holds answers of other weights. Moved to {move_aside(self.path).name}."
            self.check_planned(round)
        if not self.is_judged_otherwise(round):
            return None
        self.take_verdicts_back(round)
        return f"{self.path} was graded otherwise than the task is now: what was sampled is graded again."

    def take_verdicts_back(self, round: Round) -> None:
        """Makes drafts of the shards that are stored, to be graded as `round` says, and moves the shards aside."""
        covered = set().union(*(draft.positions for draft in self.read_drafts(round).values()))
        for number in self.stored_shards():
            if self.set_damaged_shard_aside(number) is not None:
                continue
            if not covered.issuperset(round.positions(number)):
                self.write_draft(round, number, self.read_shard(number).without_verdicts())
            self.set_shard_aside(number)
        self.open(round)

    def write_regraded(self, round: Round, number: int, shard: Shard) -> None:
        """Stores new verdicts beside the old, which stand until `adopt_regraded`."""
        self._write("regraded", number, round, shard)

    def has_regraded(self, number: int) -> bool:
        return self._paths("regraded", number)[1].exists()

    def set_regraded_aside(self, round: Round) -> None:
        """Moves new verdicts out of the way that were given otherwise than the round's, and were not adopted."""
        seals: list[StorePath] = [*self.path.glob("regraded-?????.json")]
        if not all(is_judged_as(round, read_json(seal, "verifier")) for seal in seals):
            for path in (*seals, *self.path.glob("regraded-?????.parquet")):
                move_aside(path)

    def adopt_regraded(self, round: Round) -> None:
        """Puts the new verdicts in the place of the old, which are moved aside; goes on where a kill ended it."""
        write_json(self.path / ADOPTING, asdict(round))
        for number in range(round.num_shards):
            parquet, seal = self._paths("regraded", number)
            if parquet.exists():
                self.set_shard_aside(number)
                rename(parquet, self._paths("groups", number)[0])
            if seal.exists():
                rename(seal, self.seal_path(number))
        self.open(round)
        self.seal(round)
        (self.path / ADOPTING).unlink()

    def finish_adopting(self) -> None:
        """Ends what a kill in `adopt_regraded` left half done."""
        if (self.path / ADOPTING).exists():
            self.adopt_regraded(round_from(self.path / ADOPTING))

    def _write(self, kind: str, number: int, round: Round, shard: Shard) -> None:
        parquet, seal = self._paths(kind, number)
        data = shard_bytes(round, shard)
        write_bytes(parquet, data)
        write_json(seal, shard_facts(round, shard, data))

    def _paths(self, kind: str, number: int) -> tuple[StorePath, StorePath]:
        """The Parquet file and the seal of a shard, or of what may become one."""
        return self.path / f"{kind}-{number:05d}.parquet", self.path / f"{kind}-{number:05d}.json"

    def failures(self) -> Iterator[FailedGroup]:
        """The groups that could not be graded, without their samples."""
        for number in self.stored_shards():
            for failure in self.shard_seal(number)["failed"]:
                yield FailedGroup(**failure)

    def shard_seal(self, number: int) -> dict[str, Any]:
        """What is known of a stored shard without reading its completions."""
        return read_json(self.seal_path(number), *SHARD_FACTS)

    def read_shard(self, number: int) -> Shard:
        """Raises StoreError where the shard is missing or does not match its seal."""
        return read_shard(self.seal_path(number))

    def completion_lengths(self, number: int) -> list[int]:
        """Tokens of each completion of a shard, in order. Raises StoreError where it cannot be read."""
        path = self.parquet_path(number)
        try:
            column = pq.read_table(pa.BufferReader(path.read_bytes()), columns=["token_ids"])["token_ids"]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise StoreError(f"{path} cannot be read: {error}. `oapl train` on its run mends it.") from error
        return [int(length) for length in pc.list_value_length(column).to_pylist()]

    def set_damaged_shard_aside(self, number: int) -> str | None:
        """Moves a stored shard that does not match its seal out of the way; returns why, or None if it is good."""
        if not self.has_shard(number):
            return None
        try:
            self.read_shard(number)
        except StoreError as error:
            self.set_shard_aside(number)
            return str(error)
        return None

    def set_damage_aside(self, first_shard: int = 0) -> list[str]:
        """Moves damaged shards from `first_shard` on, and a description that cannot be read, out of the way; returns
        what was found."""
        found = []
        for number in (number for number in self.stored_shards() if number >= first_shard):
            if (damage := self.set_damaged_shard_aside(number)) is not None:
                found.append(f"{damage}. Moved aside; it is sampled again.")
        if self.is_open():
            try:
                self.load()
            except StoreError as error:
                found.append(f"{error}. Moved to {move_aside(self.path / 'round.json').name}.")
        return found

    def set_shard_aside(self, number: int) -> None:
        """Moves a shard out of the way, its seal first, and before it that of the round, which is complete no more."""
        parquet = self.parquet_path(number)
        for path in (self.path / SEAL, self.seal_path(number), parquet):
            if path.exists():
                move_aside(path)

    def set_strange_shards_aside(self, round: Round) -> list[int]:
        """Moves shards of other weights, or of another grader of what scores weights, out of the way: a sampler stored
        them that was late for a round which was moved aside, or whose verdicts were taken back. Returns their
        numbers."""
        strange = [number for number in self.stored_shards() if not self.is_shard_of(round, number)]
        for number in strange:
            self.set_shard_aside(number)
        return strange

    def is_shard_of(self, round: Round, number: int) -> bool:
        """Whether a stored shard is of the round's policy, and judged as the round is, where that scores weights; those
        of earlier versions do not say. One that another process has set aside by now is not."""
        try:
            seal = self.shard_seal(number)
        except StoreError as error:
            if not is_missing(error):
                raise
            return False
        is_judged = not round.problems or is_judged_as(round, seal)
        return is_of_policy(round, seal) and is_judged

    def seal(self, round: Round) -> None:
        """Declares the round complete. Every shard must be in."""
        for seal in self.path.glob("draft-?????.json"):
            self.remove_draft(int(seal.stem.removeprefix("draft-")))
        write_json(self.path / SEAL, totals([self.shard_seal(number) for number in range(round.num_shards)]))

    def summary(self) -> dict[str, Any]:
        """What the seals of its shards say together (see `totals`); of a sealed round, one file says it."""
        if self.is_sealed():
            with suppress(StoreError):  # that of an earlier version lacks some
                return read_json(self.path / SEAL, *totals(()))
        return totals([self.shard_seal(number) for number in self.stored_shards()])

    def is_complete_of(self, policy: PolicyRef | None) -> bool:
        """Whether the round is sealed, and of these very weights."""
        return self.is_sealed() and self.load().policy == policy

    def is_sealed(self) -> bool:
        """Whether the round was declared complete, and still has all of its shards."""
        if not (self.path / SEAL).exists() or not self.is_open():
            return False
        try:
            return len(self.stored_shards()) == self.load().num_shards
        except StoreError:
            return False


def is_of_policy(round: Round, facts: Mapping[str, Any]) -> bool:
    """Whether a seal is of the round's policy; those of earlier versions do not say."""
    return bool(facts.get("policy", round.policy.digest) == round.policy.digest)


def is_judged_as(round: Round, facts: Mapping[str, Any]) -> bool:
    """Whether what a round or a seal says of its verdicts is true of `round`'s; those of earlier versions say less."""
    return facts.get("verifier", round.verifier) == round.verifier and (facts.get("gold") or round.gold) == round.gold


def round_from(path: StorePath) -> Round:
    """Raises StoreError where the file does not describe a round."""
    value = read_json(path)
    try:
        return Round(
            **{
                **value,
                "policy": PolicyRef(**value["policy"]),
                "sampling": SamplingParams(**{**value["sampling"], "stop": tuple(value["sampling"].get("stop", ()))}),
                "prompt_ids": tuple(value["prompt_ids"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} does not describe a round: {error!r}") from error


def shard_bytes(round: Round, shard: Shard) -> bytes:
    """The Parquet file of a shard's groups, those that could not be graded among them."""
    ungraded = [failed.sampled for failed in shard.failed if failed.sampled is not None]
    groups = sorted([*shard.groups, *ungraded], key=lambda group: group.position)
    sink = pa.BufferOutputStream()
    pq.write_table(groups_table(round, groups), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def shard_facts(round: Round, shard: Shard, data: bytes) -> dict[str, Any]:
    """What a shard's seal says; `data` are the bytes of its Parquet file."""
    return {
        "digest": digest_bytes(data),
        "policy": round.policy.digest,
        "num_groups": len(shard.groups),
        "num_completions": shard.num_completions,
        "num_tokens": shard.num_tokens,
        "sampling_s": shard.sampling_s,
        "grading_s": shard.grading_s,
        "mismatch": shard.mismatch,
        "time": time.time(),
        "verifier": round.verifier,
        "gold": round.gold,
        "failed": [
            {"position": failed.position, "prompt_id": failed.prompt_id, "cause": failed.cause}
            for failed in shard.failed
        ],
    }


def totals(seals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a round's seal says, from those of its shards in order."""
    return {
        "num_groups": sum(seal["num_groups"] for seal in seals),
        "num_failed": sum(len(seal["failed"]) for seal in seals),
        "num_completions": sum(seal["num_completions"] for seal in seals),
        "num_tokens": sum(seal["num_tokens"] for seal in seals),
        "sampling_s": sum(seal["sampling_s"] for seal in seals),
        "digests": [seal["digest"] for seal in seals],
    }


def parquet_of(seal: StorePath) -> StorePath:
    """The file that a shard's seal names; that of the seal's own name where it cannot be read or names none."""
    name = seal.stem
    with suppress(StoreError):
        name = str(read_json(seal, "file")["file"]).removesuffix(".parquet")
    return seal.with_name(f"{name if re.fullmatch(r'[a-z]+-[0-9a-f-]+', name) else seal.stem}.parquet")


def read_shard(seal_path: StorePath) -> Shard:
    """Raises StoreError where a file is missing or does not match its seal."""
    seal, parquet = read_json(seal_path, *SHARD_FACTS), parquet_of(seal_path)
    try:
        data = parquet.read_bytes()
    except OSError as error:
        raise StoreError(f"{parquet} cannot be read: {error.strerror}") from error
    if (found := digest_bytes(data)) != seal["digest"]:
        raise StoreError(
            f"{parquet} does not match its seal: SHA-256 {found[:12]}…, sealed as {seal['digest'][:12]}…. "
            f"The file was altered or cut short"
        )
    stored = list(table_groups(pq.read_table(pa.BufferReader(data), use_threads=False)))
    ungraded = {group.position: group for group in stored if not isinstance(group, Group)}
    try:
        failed = tuple(FailedGroup(**failure, sampled=ungraded.get(failure["position"])) for failure in seal["failed"])
    except (KeyError, TypeError) as error:
        raise StoreError(f"{seal_path} does not describe its failed groups: {error}") from error
    graded = tuple(group for group in stored if isinstance(group, Group))
    return Shard(graded, failed, seal["sampling_s"], seal["grading_s"], seal["mismatch"])


def groups_table(round: Round, groups: Sequence[SampledGroup]) -> pa.Table:
    rows = [
        {
            "round": round.index,
            "position": group.position,
            "prompt_id": group.prompt_id,
            "index": index,
            "prompt": group.prompt,
            "completion": text,
            **verdict_columns(group.verdicts[index] if isinstance(group, Group) else None),
            "finish_reason": completion.finish_reason,
            "prompt_ids": group.prompt_ids,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "policy_version": round.policy.version,
            "policy_digest": round.policy.digest,
            "temperature": round.sampling.temperature,
            "max_completion_length": round.sampling.max_completion_length,
            "seed": round.seed,
            "verifier": round.verifier,
            OTHER_REWARDS.name: (group.other_rewards if isinstance(group, Group) else ()) or None,
        }
        for group in groups
        for index, (completion, text) in enumerate(zip(group.completions, group.texts, strict=True))
    ]
    has_others = any(row[OTHER_REWARDS.name] for row in rows)
    return pa.Table.from_pylist(rows, schema=SCHEMA.append(OTHER_REWARDS) if has_others else SCHEMA)


def verdict_columns(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"reward": None, "answer": None, "reason": None, "scores": None}
    return {
        "reward": verdict.reward,
        "answer": verdict.answer,
        "reason": verdict.reason,
        "scores": list(verdict.scores.items()),
    }


def table_groups(table: pa.Table) -> Iterator[SampledGroup]:
    """The groups of a table whose rows are as `groups_table` made them: a prompt's completions in order. Those without
    rewards were not graded."""
    columns: dict[str, list[Any]] = {
        name: table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
        for name in (*SCHEMA.names, OTHER_REWARDS.name)  # rounds of earlier versions lack some
        if name not in ("token_ids", "logprobs")
    }
    token_ids = list_column(table, "token_ids")
    logprobs = list_column(table, "logprobs")
    start = 0
    for end in range(1, table.num_rows + 1):
        if end < table.num_rows and columns["position"][end] == columns["position"][start]:
            continue
        sampled = SampledGroup(
            position=columns["position"][start],
            prompt_id=columns["prompt_id"][start],
            prompt=columns["prompt"][start],
            prompt_ids=np.array(columns["prompt_ids"][start], np.int32),
            completions=tuple(
                Completion(token_ids[row], logprobs[row], columns["finish_reason"][row]) for row in range(start, end)
            ),
            texts=tuple(columns["completion"][start:end]),
        )
        if columns["reward"][start] is None:
            yield sampled
        else:
            verdicts = [row_verdict(columns, row) for row in range(start, end)]
            yield Group.of(sampled, verdicts, columns[OTHER_REWARDS.name][start] or ())
        start = end


def row_verdict(columns: Mapping[str, list[Any]], row: int) -> Verdict:
    return Verdict(
        reward=columns["reward"][row],
        answer=columns["answer"][row],
        reason=columns["reason"][row] or "",
        scores=dict(columns["scores"][row] or ()),
    )


def list_column(table: pa.Table, name: str) -> list[np.ndarray]:
    """A list column as one numpy array a row."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]
