"""The page's server: its files, and what it asks for as JSON. Nothing here writes."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from oapl.errors import ConfigError, OaplError, StoreError
from oapl.paths import StorePath
from oapl.report.completions import Scorer, ShownGroup
from oapl.report.page import finite
from oapl.store.files import read_bytes
from oapl.types import Group
from oapl.view.access import Access, is_loopback, names_of_machine
from oapl.view.index import Filters, Index
from oapl.view.runs import Found, Runs, check_folder, check_inside
from oapl.view.state import State

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_WEIGHTS = 1_000_000_000
"""Bytes of weights that are loaded to score a group without being asked to."""
MAX_SCORES = 64
"""Groups whose scores are kept."""
MAX_INDEXES = 8
MAX_REWARD = 3.4e38
"""What the index holds in 32 bits."""


class Views:
    """What is kept of each run that somebody looks at."""

    def __init__(self, runs: Runs, scorer: Scorer | None, folder: Path) -> None:
        self.runs, self._scorer, self._folder = runs, scorer, folder
        self._lock, self._scoring = threading.Lock(), threading.Lock()
        self._states: dict[str, State] = {}
        self._indexes: OrderedDict[str, tuple[Found, Index]] = OrderedDict()
        self._scores: OrderedDict[tuple[Any, ...], dict[str, Any]] = OrderedDict()

    def state(self, found: Found) -> State:
        with self._lock:
            state = self._states.get(found.name)
            if state is None or state.found is not found:  # new, or with other settings
                state = State(found, 0 if state is None else state.version)
                self._states[found.name] = state
            return state

    def index(self, found: Found) -> Index:
        """That of the run, which is made from now on where there is none. Of many, the one that was asked for longest
        ago is closed."""
        old: list[Index] = []
        with self._lock:
            version = 0
            if found.name in self._indexes and self._indexes[found.name][0] is not found:  # with other settings now
                old.append(self._indexes.pop(found.name)[1])
                version = old[0].progress.version + 1
            if found.name not in self._indexes:
                folder = Path(tempfile.mkdtemp(dir=self._folder))
                task = found.recipe.task
                index = Index(found.run, task.success_threshold, task.judged_by, folder, version)
                self._indexes[found.name] = found, index
                if len(self._indexes) > MAX_INDEXES:
                    old.append(self._indexes.popitem(last=False)[1][1])
            self._indexes.move_to_end(found.name)
            index = self._indexes[found.name][1]
        for each in old:
            each.close()  # may take its time, for which nobody else is to wait
        index.ask()
        return index

    def close(self) -> None:
        for _, index in self._indexes.values():
            index.close()

    def scores(self, found: Found, index: int, position: int, large: bool) -> dict[str, Any]:
        """The log-ratios of a group's tokens under the newest sealed policy, or why there are none. One group is scored
        at a time."""
        if self._scorer is None:
            return {"why": "oapl view was started with --no_scores."}
        run = found.run
        shown, digest = self._group(found, index, position)
        version = run.newest_version()
        if version is None:
            return {"why": "The run holds no policy any more."}
        policy = Path(run.policy_path(version))
        for path in (policy, *policy.rglob("*")):
            check_inside(path, Path(run.path))
        key = (found.name, run.policy(version), index, position, digest)
        if key in self._scores:
            return self._scores[key]
        size = sum(path.stat().st_size for path in Path(run.policy_path(version)).glob("*.safetensors"))
        if size > MAX_WEIGHTS and not large:
            return {"policy": version, "bytes": size}
        with self._scoring:
            try:
                scores = self._scorer(run, [shown])
            except OaplError as error:
                return {"why": str(error)}
        answer = {
            "policy": scores.policy_version,
            "digest": digest,
            "answers": [
                {
                    "pieces": pieces,
                    "ratios": [round(float(ratio), 4) for ratio in ratios],
                    "logprobs": [round(float(logprob), 4) for logprob in completion.logprobs],
                }
                for pieces, ratios, completion in zip(
                    scores.pieces[0], scores.log_ratios[0], shown.group.completions, strict=True
                )
            ],
        }
        self._scores[key] = answer
        while len(self._scores) > MAX_SCORES:
            self._scores.popitem(last=False)
        return answer

    def group(self, found: Found, index: int, position: int) -> dict[str, Any]:
        """A group with its texts, whole, as the shard's file has them."""
        shown, digest = self._group(found, index, position)
        group, task = shown.group, found.recipe.task
        graded = isinstance(group, Group)
        marks = group.marks(task.judged_by) if graded else None
        number = position // shown.round.prompts_per_shard
        causes = {failed.position: failed.cause for failed in found.run.round(index).failures()} if not graded else {}
        return {
            "round": index,
            "step": shown.step,
            "shard": number,
            "file": str(Path(found.run.round(index).parquet_path(number)).relative_to(Path(found.run.path))),
            "digest": digest,
            "position": position,
            "prompt_id": group.prompt_id,
            "prompt": group.prompt,
            "sampler": shown.round.policy.version,
            "verifier": shown.round.verifier,
            "cause": causes.get(position),
            "answers": [
                {
                    "text": text,
                    "finish": completion.finish_reason,
                    "length": len(completion.token_ids),
                    "logprob": float(completion.logprobs.sum()),
                    "mean_logprob": float(completion.logprobs.mean()),
                    **(verdict_of(group, i, bool(marks[i] >= task.success_threshold)) if marks is not None else {}),
                }
                for i, (completion, text) in enumerate(zip(group.completions, group.texts, strict=True))
            ],
        }

    def _group(self, found: Found, index: int, position: int) -> tuple[ShownGroup, str]:
        """The group, and the digest of its shard. Raises StoreError where it is not stored, or its shard is damaged."""
        folder, missing = found.run.round(index), f"{found.name} holds no group {position} of round {index}"
        if index < 0 or position < 0 or not folder.is_open():
            raise StoreError(f"{missing}: it has no such round.")
        root = Path(found.run.path)
        check_folder(Path(folder.path), root)
        round = folder.load()
        number = position // round.prompts_per_shard
        if position >= round.num_prompts or not folder.has_shard(number):
            raise StoreError(f"{missing} yet: its shard is not sealed.")
        check_inside(Path(folder.parquet_path(number)), root)
        digest = str(folder.shard_seal(number)["digest"])
        shard = folder.read_shard(number)
        held: list[Any] = [*shard.groups, *(failed.sampled for failed in shard.failed if failed.sampled is not None)]
        for group in held:
            if group.position == position:
                step = index * found.recipe.trainer.weight_sync_steps + number + 1
                return ShownGroup(round, step, group), digest
        causes = [failed.cause for failed in shard.failed if failed.position == position]
        raise StoreError(f"{missing}: {causes[0] if causes else 'its shard lacks it'}")


def verdict_of(group: Group, i: int, is_right: bool) -> dict[str, Any]:
    verdict = group.verdicts[i]
    return {
        "reward": verdict.reward,
        "is_right": is_right,
        "reason": verdict.reason,
        "answer": verdict.answer,
        "scores": dict(verdict.scores),
    }


def make_app(runs: Runs, scorer: Scorer | None, names: Sequence[str], token: str | None, port: int) -> ASGIApp:
    """The page of these runs; `names`, `token` and `port` as `Access` takes them. Ends what it keeps when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="oapl-view-"))
    views = Views(runs, scorer, folder)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        views.close()
        shutil.rmtree(folder, ignore_errors=True)

    def list_runs(_: Mapping[str, str]) -> dict[str, Any]:
        return {"runs": runs.cards(), "notes": runs.notes(), "is_one": runs.is_one()}

    def look(query: Mapping[str, str]) -> dict[str, Any]:
        found = runs.get(query.get("run", ""))
        state = views.state(found).look(number(query, "seen", -1))
        progress = views.index(found).progress  # begun after the first look, which is not to wait for it
        return {**state, "index": {**vars(progress), "notes": list(progress.notes)}}

    def completions(query: Mapping[str, str]) -> dict[str, Any]:
        filters, index = filters_of(query), views.index(runs.get(query.get("run", "")))
        version = index.progress.version
        if not filters.text or filters.verdict == "failed":
            return {**index.page(filters, max(0, number(query, "offset", 0))), "version": version}
        before = (number(query, "before_round"), number(query, "before_shard")) if "before_round" in query else None
        return {**index.search(filters, before), "version": version}

    def group(query: Mapping[str, str]) -> dict[str, Any]:
        return views.group(runs.get(query.get("run", "")), number(query, "round"), number(query, "position"))

    def scores(query: Mapping[str, str]) -> dict[str, Any]:
        found, large = runs.get(query.get("run", "")), bool(query.get("large"))
        return views.scores(found, number(query, "round"), number(query, "position"), large)

    questions: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
        "runs": list_runs,
        "state": look,
        "completions": completions,
        "group": group,
        "scores": scores,
    }
    routes = [Route("/", page_file(STATIC / "index.html"))]
    routes += [
        Route(f"/static/{path.name}", page_file(path)) for path in sorted(STATIC.iterdir()) if path.suffix in TYPES
    ]
    routes += [Route(f"/api/{name}", json_answer(question)) for name, question in questions.items()]
    return Access(Starlette(routes=routes, lifespan=lifespan), names, token, port)


def page_file(path: Path) -> Callable[[Request], Response]:
    data, kind = read_bytes(path), TYPES[path.suffix]
    return lambda _: Response(data, media_type=f"{kind}; charset=utf-8")


def json_answer(question: Callable[[Mapping[str, str]], dict[str, Any]]) -> Callable[[Request], Response]:
    """In a thread of its own, as Starlette calls what is no coroutine."""

    def answer(request: Request) -> Response:
        try:
            status, value = 200, question(request.query_params)
        except ConfigError as error:
            status, value = 400, {"error": str(error)}
        except OaplError as error:
            status, value = 404, {"error": str(error)}
        data = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
        return Response(data, status, media_type="application/json")

    return answer


def number(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Raises ConfigError where it is no whole number that a database holds, or missing and without a default."""
    text = query.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ConfigError(f"{name} must be a whole number, not {text!r}.")
    return int(text)


def filters_of(query: Mapping[str, str]) -> Filters:
    def real(name: str) -> float | None:
        try:
            value = float(query[name]) if query.get(name) else None
        except ValueError as error:
            raise ConfigError(f"{name} must be a number, not {query[name]!r}.") from error
        if value is not None and not abs(value) <= MAX_REWARD:
            raise ConfigError(f"{name} must be a number up to {MAX_REWARD:g}, not {query[name]!r}.")
        return value

    def whole(name: str) -> int | None:
        return number(query, name) if query.get(name) else None

    words = {name: query[name] for name in ("verdict", "finish", "prompt", "text", "order") if query.get(name)}
    return Filters(
        **words,  # type: ignore[arg-type]  # checked when made
        first_round=whole("first_round"),
        last_round=whole("last_round"),
        least_reward=real("least_reward"),
        most_reward=real("most_reward"),
    )


def serve(paths: Sequence[StorePath], scorer: Scorer | None, host: str, port: int) -> None:
    """Shows the runs until it is stopped. Raises ConfigError where a path holds no runs, or the port cannot be had."""
    runs = Runs(paths)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
        place.listen()  # before its address is told
    except OSError as error:
        place.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}. Give another --host or --port."
        ) from error
    port = place.getsockname()[1]
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    names = {"localhost"} if token is None else {"localhost", host, *names_of_machine()}
    name = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    shown = f"http://{f'[{name}]' if ':' in name else name}:{port}/{f'?token={token}' if token else ''}"
    print(f"{len(runs.all())} runs at {shown}   (Ctrl-C ends it)", flush=True)
    app = make_app(runs, scorer, sorted(names), token, port)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    try:
        uvicorn.Server(config).run(sockets=[place])
    except KeyboardInterrupt:
        print("ended")
