"""vLLM's own servers as an engine: token ids over HTTP to one or many, on this machine or others.

Who holds which weights: a load pauses the server, labels it with a name that no other load has, puts the weights in
place, and lets it go on. vLLM says with each completion under which labels its tokens were made. One that was made
under any other label than the last load's is never returned: the server was started anew, or another sampler loaded it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx2
import numpy as np
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from oapl.config import EngineConfig
from oapl.engines.base import Engine
from oapl.errors import EngineError, PolicyLostError
from oapl.model import eos_token_ids, has_tied_head
from oapl.plan import derive_seed
from oapl.types import Completion, Request, SamplingParams

PATIENCE_S = 600.0
"""Seconds for which a server that does not answer, or says that it cannot now, is asked again."""
LONGEST_WAIT_S = 20.0
START_S = 1800.0
"""Seconds within which a server that was started here has to be ready."""
ANSWER_S = 3600.0
"""Longest wait for one answer: longer than any completion or load takes. A cut network is noticed in three minutes."""
LOOK_S = 60.0
"""The same for a look at a server, which it answers at once."""
STOP_S = 30.0
"""Seconds in which a server ends by itself before it is killed."""

FLAGS = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --dtype {dtype}"
API_KEY = "VLLM_API_KEY"
UNLABELLED = "default"
"""vLLM's label before the first load."""
LOWEST = -9999.0
"""What vLLM writes for a log-prob that is NaN or minus infinity."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Of a server that is started here, where the user has not set them."""
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
]
UNTIL_STDIN_ENDS = f"""
trap "" TERM
exec 3<&0
(trap - TERM; exec "$@") 3<&- &
server=$!
{{ cat <&3; kill 0; sleep {STOP_S:.0f}; kill -9 0; }} &
wait "$server"
"""
"""A shell's program: runs a command, and ends its process group once the one who started it has ended in any way."""

Client = httpx2.AsyncClient
T = TypeVar("T")
log = logging.getLogger(__name__)


class VLLMServerEngine(Engine):
    """Spreads requests over servers that all hold the policy. A group goes to one, whose cache has its prompt."""

    def __init__(self, config: EngineConfig, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._config = config
        self._servers = [Server(url, config, should_stop) for url in config.server_urls]
        self._eos: list[int] = []
        self._policy: Path | None = None
        self._made: dict[Hashable, Completion] = {}
        """Of a call that ended before all were made, by what each is made from."""

    def load(self, policy: Path) -> None:
        self._eos, self._policy = eos_token_ids(policy), policy.resolve()
        self._ask([partial(server.load, policy=self._policy) for server in self._servers])

    def close(self) -> None:
        """Ends the servers that were started here; others go on."""
        for server in self._servers:
            server.stop()

    @property
    def context_length(self) -> int:
        return min(server.max_model_len for server in self._servers) - 1  # vLLM refuses a prompt that fills it

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """Where a server lost the policy, the others end what they have, and it is kept for the next call."""
        indices = range(params.num_generations)
        keys = [
            [(self._policy, params, request.prompt_ids.tobytes(), request.seed, index) for index in indices]
            for request in requests
        ]
        self._made = {key: self._made[key] for group in keys for key in group if key in self._made}
        self._ask(
            [
                partial(
                    self._make,
                    server=self._servers[number % len(self._servers)],
                    prompt=request.prompt_ids.tolist(),
                    sampling=self._sampling(request, index, params),
                    key=keys[number][index],
                )
                for number, request in enumerate(requests)
                for index in indices
                if keys[number][index] not in self._made
            ]
        )
        made, self._made = self._made, {}
        return [[made[key] for key in group] for group in keys]

    async def _make(
        self, client: Client, server: Server, prompt: list[int], sampling: dict[str, Any], key: Hashable
    ) -> None:
        self._made[key] = await server.complete(client, prompt, sampling)

    def _sampling(self, request: Request, index: int, params: SamplingParams) -> dict[str, Any]:
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_completion_length,
            "seed": derive_seed(request.seed, index),
            "logprobs": 0,  # of the sampled token alone
            "ignore_eos": True,  # vLLM's own idea of it, the tokenizer's besides the model's
            "stop_token_ids": self._eos,
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # a stop text may be one
            "detokenize": bool(params.stop),
        }

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """By every server. Raises EngineError where two differ by more than the tolerance of the probe."""
        calls = [partial(server.score, sequence=list(sequence)) for server in self._servers for sequence in sequences]
        answers = iter(self._ask(calls))
        first, *others = [[next(answers) for _ in sequences] for _ in self._servers]
        for server, scores in zip(self._servers[1:], others, strict=True):
            gap = float(np.mean(np.abs(np.concatenate(scores) - np.concatenate(first))))
            if not gap <= self._config.tolerance():
                raise EngineError(
                    f"{server.url} and {self._servers[0].url} give the same tokens log-probs that differ by {gap:.4f} "
                    f"nats a token, more than engine.probe_tolerance = {self._config.tolerance()}: they compute "
                    f"differently, or one took no new weights. Start both anew, with the same flags."
                )
        return first

    def _ask(self, calls: Sequence[Callable[[Client], Awaitable[T]]]) -> list[T]:
        """Their answers, in order; `max_num_seqs` are in flight at once. The first error ends all; where it is a policy
        that a server lost, once the others' calls have ended."""
        try:
            return asyncio.run(all_of(calls, self._config.max_num_seqs))
        except BaseExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from error.__cause__


async def all_of(calls: Sequence[Callable[[Client], Awaitable[T]]], num_at_once: int) -> list[T]:
    seats = asyncio.Semaphore(num_at_once)
    key = os.environ.get(API_KEY)
    lost: list[PolicyLostError] = []
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        Client(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            transport=httpx2.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE),
        ) as client,
        asyncio.TaskGroup() as group,
    ):

        async def seated(call: Callable[[Client], Awaitable[T]]) -> T | None:
            async with seats:
                try:
                    return await call(client)
                except PolicyLostError as error:
                    lost.append(error)
                    return None

        tasks = [group.create_task(seated(call)) for call in calls]
    if lost:
        raise lost[0]
    return [cast(T, task.result()) for task in tasks]


class Refused(Exception):
    """An answer that asking again does not change."""


class Unavailable(Exception):
    """No answer, or one that says that there is none now."""


class Gone(Unavailable):
    """Nobody listens."""


class Server:
    """One `vllm serve`, and what this engine last put into it."""

    def __init__(self, url: str, config: EngineConfig, should_stop: Callable[[], bool]) -> None:
        self.url, self._config, self._should_stop = url, config, should_stop
        self.max_model_len, self._device, self._started_with = 0, "", ""
        self._label = ""
        self._is_lost = False
        """Whether it was seen without the weights of the last load: it is asked for nothing until the next one."""
        self._process: subprocess.Popen[bytes] | None = None

    # Weights

    async def load(self, client: Client, policy: Path) -> None:
        """Puts the policy's weights in the place of those before. Where the server cannot take them and was started
        here, it is started anew. Raises PolicyLostError where it was started anew meanwhile."""
        self._label, self._is_lost = f"{policy.name}-{uuid.uuid4().hex}", False
        await self._be_started(client, policy)
        await self._check_settings(client)
        if self._started_with == str(policy) and await self._find_label(client) == UNLABELLED:
            await self._set_label(client)  # for it has taken no other since
            return
        try:
            await self._reload(client, policy)
        except Refused as error:
            if self._process is None:
                remedy = "set engine.server_command, by which the sampler starts it with them"
                if self._config.server_command is not None:
                    remedy = "give the same command: engine.server_command starts it with them"
                raise EngineError(
                    f"{self.url} cannot take the weights of {policy}: {error}. End this server and {remedy}."
                ) from error
            log.warning("%s takes no new weights and is started anew: %s", self.url, error)
            self.stop()
            await self.load(client, policy)

    async def _reload(self, client: Client, policy: Path) -> None:
        """Labels it before and after, so that of two samplers that load at once both find the other's label."""
        if self._device == "cpu" and has_tied_head(policy):
            raise Refused(
                "on a CPU, vLLM computes with a packed copy of a head that is tied to the embeddings, and a reload "
                "leaves the copy as it was"
            )
        await self.ask(client, "POST", "/pause?mode=abort")
        await self._set_label(client)
        try:
            await self._call(client, "reset_weights")  # zeros are left, and found, of what the reload passes over
            await self._call(client, "reload_weights", weights_path=str(policy))
        except Unavailable as error:
            raise Refused(
                f"{error}. It must see this folder under this very path, as on a shared disk, and serve a model of "
                f"this kind; now it has no weights, and may have ended"
            ) from error
        if not (await self._at_once(client, "POST", "/reset_prefix_cache"))["success"]:
            raise Refused("its prefix cache, which is of the old weights, is in use")
        found = await self._find_label(client)
        if found != UNLABELLED:
            await self._set_label(client)
        self._check_made_under([found])
        await self._at_once(client, "POST", "/resume")

    async def _call(self, client: Client, method: str, **arguments: str) -> None:
        """A method of the server's workers, once: one that fails may end the server."""
        await self._once(client, "POST", "/collective_rpc", {"method": method, "kwargs": arguments})

    async def _find_label(self, client: Client) -> str:
        return str((await self._at_once(client, "GET", "/weight_info"))["weight_version"])

    async def _set_label(self, client: Client) -> None:
        await self._at_once(client, "POST", "/update_weight_version", {"new_version": self._label})

    def _check_made_under(self, labels: Sequence[str]) -> None:
        """Raises PolicyLostError where the server was started anew, EngineError where another sampler loaded it."""
        strange = set(labels) - {self._label, UNLABELLED}
        if strange:
            raise EngineError(
                f"{self.url} was given other weights ({', '.join(sorted(strange))}) while this sampler worked with "
                f"{self._label}: another sampler uses it. Give each sampler servers of its own in engine.server_urls."
            )
        if set(labels) != {self._label}:
            raise PolicyLostError(f"{self.url} was started anew, and holds {self._label} no longer")

    # Work

    async def complete(self, client: Client, prompt: list[int], sampling: dict[str, Any]) -> Completion:
        choice = (await self._generate(client, prompt, sampling))["choices"][0]
        token_ids = np.array(choice["token_ids"], np.int32)
        logprobs = np.array([made["logprob"] for made in choice["logprobs"]["content"]], np.float32)
        if not (logprobs > LOWEST).all():
            raise EngineError(
                f"{self.url} gives log-probs that are not finite, so the policy's weights are broken, or "
                f"--dtype {self._config.dtype} is too coarse for them."
            )
        return Completion(token_ids, logprobs, "stop" if choice["finish_reason"] == "stop" else "length")

    async def score(self, client: Client, sequence: list[int]) -> list[float]:
        answer = await self._generate(client, sequence, {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False})
        return [
            float(given[str(token)]["logprob"])
            for token, given in zip(sequence[1:], answer["prompt_logprobs"][1:], strict=True)
        ]

    async def _generate(self, client: Client, prompt: list[int], sampling: dict[str, Any]) -> Any:
        """An answer that was made by the weights of the last load, from its first token to its last."""
        if self._is_lost:
            raise PolicyLostError(f"{self.url} holds {self._label} no longer")
        try:
            answer = await self.ask(
                client, "POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}
            )
            choice = answer["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):  # another sampler's load, or the server's end
                self._check_made_under([await self._find_label(client)])
                raise PolicyLostError(f"{self.url} broke a completion off ({choice['finish_reason']})")
            self._check_made_under([span["version"] for span in choice["weight_versions"] or ()])
        except PolicyLostError:
            self._is_lost = True
            raise
        return answer

    # HTTP

    async def ask(self, client: Client, method: str, path: str, body: Any = None) -> Any:
        """Asks until it answers, for PATIENCE_S from its first failure on. Raises EngineError after that, and where it
        refuses; PolicyLostError where it has ended and a load would start it."""
        failures: list[float] = []

        def is_enough(state: RetryCallState) -> bool:
            failures.append(time.monotonic())
            return failures[-1] - failures[0] > PATIENCE_S or self._is_gone(error_of(state)) or self._should_stop()

        def tell(state: RetryCallState) -> None:
            if state.attempt_number in (3, 6) or state.attempt_number % 10 == 0:
                log.warning("%s fails, and is asked again for %.0f s: %s", self.url, PATIENCE_S, error_of(state))

        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Unavailable),
                wait=wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT_S),
                stop=is_enough,
                before_sleep=tell,
                sleep=self._pause,
                reraise=True,
            ):
                with attempt:
                    return await self._once(client, method, path, body)
        except Unavailable as error:
            if self._is_gone(error):
                raise PolicyLostError(f"{self.url} has ended") from error
            if self._should_stop():
                raise EngineError(f"stopped while {self.url} fails: {error}") from error
            raise EngineError(
                f"{self.url} has failed for {PATIENCE_S:.0f} s: {error}. Start it again, or correct "
                f"engine.server_urls, and give the same command: what was stored is kept."
            ) from error
        except Refused as error:
            raise EngineError(f"{self.url}{path}: {error}") from error

    async def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._should_stop():
            await asyncio.sleep(min(0.1, seconds))

    async def _at_once(self, client: Client, method: str, path: str, body: Any = None) -> Any:
        """Asks once, where a server that fails may come back with other weights. Raises PolicyLostError then."""
        try:
            return await self._once(client, method, path, body)
        except Unavailable as error:
            raise PolicyLostError(f"{self.url} fails with its weights just loaded: {error}") from error
        except Refused as error:
            raise EngineError(f"{self.url}{path}: {error}") from error

    async def _once(self, client: Client, method: str, path: str, body: Any = None) -> Any:
        try:
            timeout = LOOK_S if method == "GET" else ANSWER_S
            answer = await client.request(
                method, self.url + path, json=body, timeout=httpx2.Timeout(timeout, connect=20.0)
            )
        except httpx2.TransportError as error:
            kind = Gone if isinstance(error, httpx2.ConnectError) else Unavailable
            raise kind(f"{type(error).__name__}: {error}") from error
        if answer.is_success:
            try:
                return answer.json() if answer.content else None
            except ValueError as error:
                raise Refused(f"it answers {answer.text[:80]!r}, which vLLM never does{self._remedy(404)}") from error
        text = f"it answers {answer.status_code}, {message_of(answer)}"
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise Unavailable(text)
        raise Refused(text + self._remedy(answer.status_code))

    def _remedy(self, status: int) -> str:
        if status == 401:
            return f". Set {API_KEY} in the sampler's environment to the server's key."
        if status in (403, 404):
            return f". Is it vLLM 0.32 or newer, started as `{FLAGS.format(dtype=self._config.dtype)}`?"
        return ""

    async def _check_settings(self, client: Client) -> None:
        """Raises EngineError where the server would compute other log-probs than those it samples from."""
        answer = await self.ask(client, "GET", "/server_info?config_format=json")
        try:
            info, device = answer["vllm_config"]["model_config"], answer["vllm_config"]["device_config"]["device"]
            self.max_model_len, self._device, self._started_with = (
                int(info["max_model_len"]),
                str(device),
                info["model"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/server_info does not answer as vLLM does ({error!r}){self._remedy(404)}"
            ) from error
        for name, flag, asked in (
            ("logprobs_mode", "--logprobs-mode", "processed_logprobs"),
            ("dtype", "--dtype", self._config.dtype),
        ):
            if (found := str(info[name]).removeprefix("torch.")) != asked:
                other = "" if name != "dtype" else f", or set engine.dtype = {found!r}"
                raise EngineError(
                    f"{self.url} runs with {flag} {found}. Start it with {flag} {asked}{other}: "
                    f"`{FLAGS.format(dtype=self._config.dtype)}`."
                )

    # A process of our own

    async def _be_started(self, client: Client, policy: Path) -> None:
        """Waits until the server answers; starts it where nobody listens."""
        if self._config.server_command is None:
            await self.ask(client, "GET", "/health")
            return
        if await self._answers(client):
            return
        self.stop()
        self._process = self._start(self._config.server_command, policy)
        end = time.monotonic() + START_S
        while time.monotonic() < end and not self._has_ended() and not self._should_stop():
            if await self._answers(client):
                return
            await asyncio.sleep(0.5)
        ended, within = self._has_ended(), "" if self._should_stop() else f" in {START_S:.0f} s"
        self.stop()
        raise EngineError(
            "engine.server_command "
            + (f"ended before {self.url} answered" if ended else f"has not made {self.url} answer{within}")
            + f"; what it said stands above. It was: {self._config.server_command}"
        )

    async def _answers(self, client: Client) -> bool:
        try:
            await self._once(client, "GET", "/health", None)
        except Unavailable:
            return False
        except Refused as error:
            raise EngineError(f"{self.url}/health: {error}") from error
        return True

    def _start(self, command: str, policy: Path) -> subprocess.Popen[bytes]:
        url = httpx2.URL(self.url)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        words = [word.format(model=policy, host=url.host, port=port) for word in shlex.split(command)]
        return subprocess.Popen(
            ["sh", "-c", UNTIL_STDIN_ENDS, "sh", *words],
            stdin=subprocess.PIPE,
            stdout=2,
            env=ENVIRONMENT | os.environ,
            start_new_session=True,
        )

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _is_gone(self, error: BaseException | None) -> bool:
        """Whether nobody is there who could still answer, and a load would start the server."""
        return self._has_ended() or (
            self._process is None and self._config.server_command is not None and isinstance(error, Gone)
        )

    def stop(self) -> None:
        """Ends the server and all its processes, if it was started here."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def error_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def message_of(answer: httpx2.Response) -> str:
    """What the server says, on one line."""
    with suppress(ValueError, KeyError, TypeError):
        error = answer.json()["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
    if "html" in answer.headers.get("content-type", ""):
        return answer.reason_phrase
    return " ".join(answer.text.split())[:200] or answer.reason_phrase
