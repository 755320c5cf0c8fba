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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
UNTIL_STDIN_ENDS = 'exec 3<&0; "$@" 3<&- & server=$!; { cat <&3; kill 0; } & wait "$server"'
"""A shell's program: runs a command, and ends its process group once the one who started it has ended in any way."""

Client = httpx2.AsyncClient
T = TypeVar("T")
log = logging.getLogger(__name__)


class VLLMServerEngine(Engine):
    """Spreads requests over servers that all hold the policy. A group goes to one, whose cache has its prompt."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._servers = [Server(url.rstrip("/"), config) for url in config.server_urls]
        self._eos: list[int] = []

    def load(self, policy: Path) -> None:
        self._eos = eos_token_ids(policy)
        self._ask([partial(server.load, policy=policy.resolve()) for server in self._servers])

    def close(self) -> None:
        """Ends the servers that were started here; others go on."""
        for server in self._servers:
            server.stop()

    @property
    def context_length(self) -> int:
        return min(server.max_model_len for server in self._servers) - 1  # vLLM refuses a prompt that fills it

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        calls = [
            partial(
                self._servers[number % len(self._servers)].complete,
                prompt=request.prompt_ids.tolist(),
                sampling=self._sampling(request, index, params),
            )
            for number, request in enumerate(requests)
            for index in range(params.num_generations)
        ]
        made = iter(self._ask(calls))
        self._ask([server.check_label for server in self._servers])
        return [[next(made) for _ in range(params.num_generations)] for _ in requests]

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
        """Their answers, in order; `max_num_seqs` are in flight at once. The first error ends all."""
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
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        Client(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            transport=httpx2.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE),
        ) as client,
        asyncio.TaskGroup() as group,
    ):

        async def seated(call: Callable[[Client], Awaitable[T]]) -> T:
            async with seats:
                return await call(client)

        tasks = [group.create_task(seated(call)) for call in calls]
    return [task.result() for task in tasks]


class Refused(Exception):
    """An answer that asking again does not change."""


class Unavailable(Exception):
    """No answer, or one that says that there is none now."""


class Server:
    """One `vllm serve`, and what this engine last put into it."""

    def __init__(self, url: str, config: EngineConfig) -> None:
        self.url, self._config = url, config
        self.max_model_len, self._device = 0, ""
        self._label = ""
        self._process: subprocess.Popen[bytes] | None = None

    # Weights

    async def load(self, client: Client, policy: Path) -> None:
        """Puts the policy's weights in the place of those before. Where the server cannot take them and was started
        here, it is started anew."""
        self._label = f"{policy.name}-{uuid.uuid4().hex}"
        is_fresh = await self._is_started(client, policy)
        await self._check_settings(client)
        if is_fresh:
            await self._set_label(client)
            return
        try:
            await self._reload(client, policy)
        except Refused as error:
            if self._process is None:
                raise EngineError(
                    f"{self.url} cannot take the weights of {policy}: {error}. End it and set engine.server_command, "
                    f"by which the sampler starts it with them."
                ) from error
            log.warning("%s takes no new weights and is started anew: %s", self.url, error)
            self.stop()
            await self.load(client, policy)

    async def _reload(self, client: Client, policy: Path) -> None:
        """Labels it before and after, so that of two samplers that load at once one at least finds the other label."""
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
        if not (await self.ask(client, "POST", "/reset_prefix_cache"))["success"]:
            raise Refused("its prefix cache, which is of the old weights, is in use")
        await self._set_label(client)
        await self.ask(client, "POST", "/resume")

    async def _call(self, client: Client, method: str, **arguments: str) -> None:
        """A method of the server's workers, once: one that fails may end the server."""
        await self._once(client, "POST", "/collective_rpc", {"method": method, "kwargs": arguments})

    async def _set_label(self, client: Client) -> None:
        await self.ask(client, "POST", "/update_weight_version", {"new_version": self._label})

    async def check_label(self, client: Client) -> None:
        """Raises PolicyLostError where the server was started anew, EngineError where another sampler loaded it."""
        self._check_made_under([(await self.ask(client, "GET", "/weight_info"))["weight_version"]])

    def _check_made_under(self, labels: Sequence[str]) -> None:
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
        answer = await self.ask(
            client, "POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}
        )
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):  # another sampler's load, or the server's end
            await self.check_label(client)
            raise PolicyLostError(f"{self.url} broke a completion off ({choice['finish_reason']})")
        self._check_made_under([span["version"] for span in choice["weight_versions"] or ()])
        return answer

    # HTTP

    async def ask(self, client: Client, method: str, path: str, body: Any = None) -> Any:
        """Asks until it answers, for PATIENCE_S from its first failure on. Raises EngineError after that, and where it
        refuses; PolicyLostError where it was started here and has ended."""
        failures: list[float] = []

        def is_enough(_: RetryCallState) -> bool:
            failures.append(time.monotonic())
            return failures[-1] - failures[0] > PATIENCE_S or self._has_ended()

        def tell(state: RetryCallState) -> None:
            assert state.outcome is not None
            if state.attempt_number in (3, 6) or state.attempt_number % 10 == 0:
                log.warning("%s does not answer, and is asked again: %s", self.url, state.outcome.exception())

        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(Unavailable),
                wait=wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT_S),
                stop=is_enough,
                before_sleep=tell,
                reraise=True,
            ):
                with attempt:
                    return await self._once(client, method, path, body)
        except Unavailable as error:
            if self._has_ended():
                raise PolicyLostError(f"the server that engine.server_command started for {self.url} ended") from error
            raise EngineError(
                f"{self.url} has not answered for {PATIENCE_S:.0f} s: {error}. Start it again, or correct "
                f"engine.server_urls, and give the same command: what was stored is kept."
            ) from error
        except Refused as error:
            raise EngineError(f"{self.url}{path}: {error}") from error

    async def _once(self, client: Client, method: str, path: str, body: Any) -> Any:
        try:
            timeout = LOOK_S if method == "GET" else ANSWER_S
            answer = await client.request(
                method, self.url + path, json=body, timeout=httpx2.Timeout(timeout, connect=20.0)
            )
        except httpx2.TransportError as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        if answer.is_success:
            return answer.json() if answer.content else None
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
        config = (await self.ask(client, "GET", "/server_info?config_format=json"))["vllm_config"]
        info = config["model_config"]
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
        self.max_model_len, self._device = int(info["max_model_len"]), str(config["device_config"]["device"])

    # A process of our own

    async def _is_started(self, client: Client, policy: Path) -> bool:
        """Waits until the server answers. True where it was started for this just now, and so holds the policy."""
        if self._config.server_command is None:
            await self.ask(client, "GET", "/health")
            return False
        if await self._answers(client):
            return False
        self.stop()
        self._process = self._start(self._config.server_command, policy)
        end = time.monotonic() + START_S
        while time.monotonic() < end and not self._has_ended():
            if await self._answers(client):
                return True
            await asyncio.sleep(0.5)
        ended = self._has_ended()
        self.stop()
        raise EngineError(
            "engine.server_command "
            + (f"ended before {self.url} answered" if ended else f"has not made {self.url} answer in {START_S:.0f} s")
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


def message_of(answer: httpx2.Response) -> str:
    """What the server says, on one line."""
    with suppress(ValueError, KeyError, TypeError):
        error = answer.json()["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
    return " ".join(answer.text.split())[:500] or answer.reason_phrase
