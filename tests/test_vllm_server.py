"""Servers of vLLM that misbehave: a stand-in speaks their protocol. tests/test_engine_contract.py has real ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import make_tiny_model
from helpers import free_port
from oapl.cli import main
from oapl.config import EngineConfig, dump_recipe, load_recipe
from oapl.engines import vllm_server
from oapl.engines.vllm_server import VLLMServerEngine
from oapl.errors import ConfigError, EngineError, PolicyLostError
from oapl.launch import check_servers_are_others
from oapl.model import PROBE
from oapl.opening import check_servers_are_of_one
from oapl.processes import wait_until
from oapl.sampler import Sampler
from oapl.store import RunFolder
from oapl.types import PolicyRef, Request, SamplingParams
from test_death import assert_complete
from test_engine_contract import SERVE

REQUESTS, PARAMS = [Request(np.array([3, 8, 5], np.int32), 1)], SamplingParams(1.0, 2, 2)
OTHER_REQUESTS = [Request(np.array([3, 8, 5], np.int32), 2)]


class Standin:
    """Answers as a server of vLLM does, with the same two tokens each time, and notes what it was asked. Its weights
    are the folder that they are of, and its log-probs the first digit of that folder's name."""

    def __init__(self) -> None:
        self.model_config = {
            "model": "/9-at-start",
            "logprobs_mode": "processed_logprobs",
            "dtype": "torch.float32",
            "max_model_len": 128,
        }
        self.start_anew()
        self.device = "cuda"
        self.before: dict[str, Callable[[], None]] = {}
        """What happens once, just before an answer of this path."""
        self.asked: list[str] = []
        self.key: str | None = None
        self.refuses: dict[str, tuple[int, Any]] = {}
        """Status and body by path, in place of the answer."""
        self.failures_left, self.answers_after_s = 0, 0.0
        self.finish_reason: str = "length"
        self.logprob: float | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null"))

            def answer(self, body: Any) -> None:
                status, value = outer.answer(self.path, body, self.headers["Authorization"])
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that ends before its answer comes is none."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def start_anew(self) -> None:
        self.label, self.weights = "default", self.model_config["model"]

    def answer(self, path: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        path = path.partition("?")[0]
        self.asked.append(path if path != "/collective_rpc" else body["method"])
        self.before.pop(self.asked[-1], lambda: None)()
        if self.key is not None and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if self.failures_left > 0:
            self.failures_left -= 1
            time.sleep(self.answers_after_s)
            return 503, {"error": {"message": "busy"}}
        if self.asked[-1] in self.refuses:
            return self.refuses[self.asked[-1]]
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if self.asked[-1] == "reload_weights":
            self.weights = body["kwargs"]["weights_path"]
        logprob = self.logprob or -float(Path(self.weights).name[0])
        sent = (body or {}).get("token_ids", [])
        answers = {
            "/server_info": {
                "vllm_config": {"model_config": self.model_config, "device_config": {"device": self.device}}
            },
            "/weight_info": {"weight_version": self.label},
            "/reset_prefix_cache": {"success": True},
            "/inference/v1/generate": {
                "choices": [
                    {
                        "token_ids": [4, 5],
                        "logprobs": {"content": [{"logprob": logprob}] * 2},
                        "finish_reason": self.finish_reason,
                        "weight_versions": [{"version": self.label}],
                    }
                ],
                "prompt_logprobs": [None, *[{str(token): {"logprob": logprob}} for token in sent[1:]]],
            },
        }
        return 200, answers.get(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Standin]:
    made = Standin()
    yield made
    made.close()


@pytest.fixture
def policy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "1"))


@pytest.fixture
def engine(server: Standin) -> VLLMServerEngine:
    return VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url,)))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "PATIENCE_S", 3.0)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_weights_are_swapped_while_the_server_is_paused(engine: VLLMServerEngine, server: Standin, policy: Path):
    engine.load(policy)
    label = "/update_weight_version"
    weights = ["reset_weights", "reload_weights", "/reset_prefix_cache"]
    swap = ["/pause", label, *weights, "/weight_info", label, "/resume"]
    assert server.asked == ["/health", "/server_info", *swap]
    (group,) = engine.generate(REQUESTS, PARAMS)
    assert [completion.token_ids.tolist() for completion in group] == [[4, 5], [4, 5]]
    assert group[0].logprobs.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        (
            "logprobs_mode",
            "raw_logprobs",
            r"runs with --logprobs-mode raw_logprobs\. Start it with --logprobs-mode pro",
        ),
        ("dtype", "torch.bfloat16", r"--dtype bfloat16\. Start it with --dtype float32, or set engine.dtype = 'bfloat"),
    ],
)
def test_a_server_whose_log_probs_would_be_others_is_refused(
    engine: VLLMServerEngine, server: Standin, policy: Path, setting: str, value: str, told: str
):
    server.model_config[setting] = value
    with pytest.raises(EngineError, match=told):
        engine.load(policy)


def test_what_a_server_made_after_it_was_started_anew_is_dropped(
    engine: VLLMServerEngine, server: Standin, policy: Path
):
    engine.load(policy)
    server.label = "default"  # as after a start
    with pytest.raises(PolicyLostError, match="was started anew"):
        engine.generate(REQUESTS, PARAMS)


@pytest.mark.parametrize("path", ["reload_weights", "/reset_prefix_cache", "/weight_info"])
def test_a_server_that_is_started_anew_during_a_load_is_not_taken_for_loaded(
    engine: VLLMServerEngine, server: Standin, policy: Path, path: str
):
    """It comes back with the weights that it was started with, and answers all that the load still asks."""
    server.before[path] = server.start_anew
    with pytest.raises(PolicyLostError, match="was started anew"):
        engine.load(policy)
    assert server.label == "default"
    engine.load(policy)
    assert engine.generate(REQUESTS, PARAMS)[0][0].logprobs[0] == -1.0


def test_a_server_that_was_started_with_the_policy_and_took_no_other_holds_it(
    engine: VLLMServerEngine, server: Standin, policy: Path
):
    server.model_config["model"] = str(policy)
    server.start_anew()
    engine.load(policy)
    assert "reload_weights" not in server.asked
    engine.load(policy)
    assert "reload_weights" in server.asked


@pytest.mark.parametrize("path", ["reload_weights", "/reset_prefix_cache", "/weight_info"])
def test_of_two_samplers_that_load_a_server_at_once_none_goes_on(
    engine: VLLMServerEngine, server: Standin, policy: Path, path: str
):
    """The second's load falls whole between two steps of the first's."""
    other = VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url,)))
    server.before[path] = lambda: other.load(Path(shutil.copytree(policy, policy.parent / "2")))
    for work in (lambda: engine.load(policy), lambda: other.generate(REQUESTS, PARAMS)):
        with pytest.raises(EngineError, match=r"another sampler uses it\. Give each sampler servers of its own"):
            work()


def test_two_samplers_on_one_server_are_told(engine: VLLMServerEngine, server: Standin, policy: Path):
    engine.load(policy)
    other = VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url,)))
    other.load(policy)
    with pytest.raises(EngineError, match=r"another sampler uses it\. Give each sampler servers of its own"):
        engine.generate(REQUESTS, PARAMS)


def test_what_other_servers_made_is_kept_when_one_lost_the_policy(server: Standin, policy: Path):
    other = Standin()
    engine = VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url, other.url), max_num_seqs=1))
    engine.load(policy)
    server.start_anew()
    with pytest.raises(PolicyLostError, match="was started anew"):
        engine.generate(REQUESTS * 2 + OTHER_REQUESTS * 2, PARAMS)
    asked = [each.asked.count("/inference/v1/generate") for each in (server, other)]
    assert asked == [1, 4], "what lost the policy is asked no more, and the other ends its part"
    engine.load(policy)
    groups = engine.generate(REQUESTS * 2 + OTHER_REQUESTS * 2, PARAMS)
    assert [[completion.logprobs[0] for completion in group] for group in groups] == [[-1.0, -1.0]] * 4
    assert [each.asked.count("/inference/v1/generate") for each in (server, other)] == [1, 4]
    other.close()


def test_a_sampler_loads_a_policy_once_more_that_its_server_lost_before_the_probe(
    write_recipe, server: Standin, policy: Path
):
    """Between the load's end and the probe's scores, when nothing was sampled yet."""
    (policy / PROBE).write_text(json.dumps({"sequences": [[3, 8, 5]], "logprobs": [[-1.0, -1.0]]}))
    recipe = load_recipe(write_recipe(engine={"kind": "vllm_server", "server_urls": [server.url]}))
    sampler = Sampler(recipe, lambda _: policy)
    server.before["/inference/v1/generate"] = server.start_anew
    sampler.hold(PolicyRef(1, 1, "a"))
    assert server.weights == str(policy)
    assert server.asked.count("reload_weights") == 2
    sampler.close()


def test_a_server_that_never_keeps_a_policy_ends_the_sampler_with_advice(write_recipe, server: Standin, policy: Path):
    recipe = load_recipe(write_recipe(engine={"kind": "vllm_server", "server_urls": [server.url]}))
    server.refuses["/reset_prefix_cache"] = (500, {"error": {"message": "out of memory"}})
    sampler = Sampler(recipe, lambda _: policy)
    with pytest.raises(EngineError, match=r"out of memory, and that for the 4th time in a row\. Find out from its own"):
        sampler.hold(PolicyRef(1, 1, "a"))
    sampler.close()


def test_told_to_stop_a_sampler_waits_for_no_server(policy: Path, monkeypatch: pytest.MonkeyPatch):
    """Its patience would be a thousand years."""
    monkeypatch.setattr(vllm_server, "PATIENCE_S", 3e10)
    url, stop = f"http://127.0.0.1:{free_port()}", threading.Event()
    threading.Timer(1.0, stop.set).start()
    config = EngineConfig(kind="vllm_server", server_urls=(url,))
    with pytest.raises(EngineError, match=f"stopped while {url} fails: ConnectError"):
        VLLMServerEngine(config, stop.is_set).load(policy)


def test_a_server_that_another_started_is_started_here_once_nobody_listens(policy: Path, tmp_path: Path):
    """It answered when the policy was loaded."""
    server = Standin()
    command = f"touch {tmp_path / 'started'} {{model}}"
    engine = VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url,), server_command=command))
    engine.load(policy)
    server.close()
    with pytest.raises(PolicyLostError, match="has ended"):
        engine.generate(REQUESTS, PARAMS)
    with pytest.raises(EngineError, match=r"engine\.server_command ended before"):
        engine.load(policy)
    assert (tmp_path / "started").exists()


def test_a_server_has_time_to_end_by_itself(engine: VLLMServerEngine, policy: Path, tmp_path: Path):
    """It takes a second after SIGTERM to write its farewell."""
    script = f"trap 'sleep 1; echo > {tmp_path / 'farewell'}; exit' TERM; echo > {tmp_path / 'up'}; sleep 60 & wait"
    server = engine._servers[0]
    server._process = server._start(f"sh -c {shlex.quote(script)}", policy)
    wait_until(lambda: (tmp_path / "up").exists(), lambda: False)
    server.stop()
    assert (tmp_path / "farewell").exists()


def test_a_completion_that_was_broken_off_is_none(engine: VLLMServerEngine, server: Standin, policy: Path):
    engine.load(policy)
    server.finish_reason = "abort"
    with pytest.raises(PolicyLostError, match=r"broke a completion off \(abort\)"):
        engine.generate(REQUESTS, PARAMS)


@pytest.mark.parametrize("logprob", [-9999.0, float("nan")])
def test_log_probs_that_are_not_finite_are_told(
    engine: VLLMServerEngine, server: Standin, policy: Path, logprob: float
):
    engine.load(policy)
    server.logprob = logprob
    with pytest.raises(EngineError, match="log-probs that are not finite"):
        engine.generate(REQUESTS, PARAMS)


def test_a_server_that_cannot_now_is_asked_again(engine: VLLMServerEngine, server: Standin, policy: Path):
    engine.load(policy)
    server.failures_left = 2
    assert len(engine.generate(REQUESTS, PARAMS)[0]) == 2


def test_patience_begins_with_the_first_failure(engine: VLLMServerEngine, server: Standin, policy: Path):
    """A completion may take longer than that before its connection breaks; here 3.5 of 3 seconds."""
    engine.load(policy)
    server.failures_left, server.answers_after_s = 1, 3.5
    assert len(engine.generate(REQUESTS, SamplingParams(1.0, 2, 1))[0]) == 1


def test_a_server_that_stays_away_is_named(policy: Path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=rf"{url} has failed for 3 s: ConnectError.*correct engine.server_urls"):
        VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(url,))).load(policy)


def test_a_server_that_refuses_says_why_and_is_not_asked_again(engine: VLLMServerEngine, server: Standin, policy: Path):
    engine.load(policy)
    server.refuses["/inference/v1/generate"] = (400, {"error": {"message": "token 77 is\nout of vocabulary"}})
    with pytest.raises(EngineError, match=r"generate: it answers 400, token 77 is out of vocabulary"):
        engine.generate(REQUESTS, PARAMS)
    assert server.asked.count("/inference/v1/generate") <= 2  # both completions were on their way


def test_a_server_without_what_is_needed_is_told_how_to_start(engine: VLLMServerEngine, server: Standin, policy: Path):
    flags = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out"
    for answer in ((404, {"detail": "Not Found"}), (200, {"name": "another service"})):
        server.refuses["/server_info"] = answer
        with pytest.raises(EngineError, match=rf"/server_info.*{flags}"):
            engine.load(policy)


def test_weights_that_the_server_cannot_see_are_told(engine: VLLMServerEngine, server: Standin, policy: Path):
    server.refuses["reload_weights"] = (500, {"error": {"message": "no such folder"}})
    with pytest.raises(EngineError, match=r"cannot take the weights of .*no such folder.*must see this folder under"):
        engine.load(policy)


def test_a_head_that_a_reload_would_leave_as_it_was_is_not_reloaded(
    engine: VLLMServerEngine, server: Standin, policy: Path
):
    """That of the tiny model is tied to its embeddings."""
    server.device = "cpu"
    with pytest.raises(EngineError, match=r"a head that is tied to the embeddings.*set engine\.server_command"):
        engine.load(policy)
    assert "reload_weights" not in server.asked


def test_weights_are_never_taken_for_granted_in_a_server_that_another_started(server: Standin, policy: Path):
    """The server that this sampler started takes none; once it is ended, another answers in its place, of weights that
    nobody knows. It is not labelled before a reload of its own."""
    engine = VLLMServerEngine(
        EngineConfig(kind="vllm_server", server_urls=(server.url,), server_command="sleep 600 {model}")
    )
    engine._servers[0]._process = engine._servers[0]._start("sleep 600", policy)
    server.refuses["reload_weights"] = (500, {"error": {"message": "no such folder"}})
    with pytest.raises(EngineError, match=r"cannot take the weights of .*no such folder"):
        engine.load(policy)
    assert server.asked.count("reload_weights") == 2
    assert server.asked.count("/update_weight_version") == 2
    engine.close()


def test_a_run_whose_samplers_would_share_servers_is_refused_at_once(write_recipe, tmp_path: Path, capsys):
    engine = {"kind": "vllm_server", "server_urls": ["http://127.0.0.1:1"]}
    for shared in (
        {"launch": {"kind": "processes", "num_samplers": 2}},
        {"launch": {"kind": "processes"}, "evaluation": {"num_workers": 2}},
    ):
        assert main(["train", str(write_recipe(engine=engine, **shared)), "--run_dir", str(tmp_path / "run")]) == 2
        assert "servers belong to one sampler at a time" in capsys.readouterr().err
    run = RunFolder(tmp_path / "other")
    run.path.mkdir()
    run.config_path.write_text(dump_recipe(load_recipe(write_recipe(engine=engine))))
    assert main(["sample", "--run_dir", str(run.path)]) == 2
    assert "http://127.0.0.1:1 is a server of the run's own sampler" in capsys.readouterr().err


@pytest.mark.parametrize("launch", [{"kind": "processes", "num_samplers": 0}, {"kind": "inline"}], ids=str)
def test_a_run_that_starts_one_sampler_or_none_shares_no_servers(launch: dict[str, object], write_recipe):
    engine = {"kind": "vllm_server", "server_urls": ["http://127.0.0.1:1"]}
    check_servers_are_of_one(load_recipe(write_recipe(engine=engine, launch=launch, evaluation={"num_workers": 2})))


def test_a_sampler_that_joins_may_take_the_servers_of_a_recipe_that_starts_none(write_recipe):
    engine = {"kind": "vllm_server", "server_urls": ["http://127.0.0.1:1"]}
    of_run = load_recipe(write_recipe(engine=engine, launch={"kind": "processes", "num_samplers": 0}))
    check_servers_are_others(of_run, of_run)


def test_what_is_said_to_a_sampler_that_would_take_the_runs_servers_can_be_done(write_recipe):
    engine = {"kind": "vllm_server", "server_urls": ["http://127.0.0.1:1"]}
    path = write_recipe(engine=engine, launch={"kind": "processes"})
    of_run = load_recipe(path)
    with pytest.raises(ConfigError, match=r"--engine\.kind embedded --engine\.server_urls '\[\]'"):
        check_servers_are_others(of_run, of_run)
    check_servers_are_others(of_run, load_recipe(path, {"engine": {"kind": "embedded", "server_urls": []}}))


def test_one_sees_that_a_server_is_away_and_may_leave_at_once(write_recipe, policy: Path, tmp_path: Path):
    url = f"http://127.0.0.1:{free_port()}"
    recipe = write_recipe(
        engine={"kind": "vllm_server", "server_urls": [url]},
        model={"name_or_path": str(policy)},
        launch={"kind": "processes"},
    )
    words = [sys.executable, "-m", "oapl", "train", str(recipe), "--run_dir", str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if "asked again" in line)
        assert re.search(rf"note: .*: {url} fails, and is asked again for 600 s: ConnectError", said)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130  # and not after ten minutes, nor when it is killed after two


def test_the_key_comes_from_the_environment(
    engine: VLLMServerEngine, server: Standin, policy: Path, monkeypatch: pytest.MonkeyPatch
):
    server.key = "a-key"
    with pytest.raises(EngineError, match=r"401.*Set VLLM_API_KEY in the sampler's environment"):
        engine.load(policy)
    monkeypatch.setenv("VLLM_API_KEY", "a-key")
    engine.load(policy)
    assert len(engine.generate(REQUESTS, PARAMS)[0]) == 2


def test_requests_are_spread_over_servers_by_group(server: Standin, policy: Path):
    other = Standin()
    engine = VLLMServerEngine(EngineConfig(kind="vllm_server", server_urls=(server.url, other.url)))
    engine.load(policy)
    engine.generate(REQUESTS * 4, PARAMS)
    assert [each.asked.count("/inference/v1/generate") for each in (server, other)] == [4, 4]
    other.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "needs `server_urls`"),
        ({"server_urls": ["node1:8000"]}, "server_urls"),
        ({"server_urls": ["http://key:secret@node1"]}, "server_urls"),
        ({"server_urls": ["http://node1:port"]}, "server_urls"),
        ({"server_urls": ["http://node1:99999"]}, "Write it like http://node1:8000"),
        ({"server_urls": ["http://a", "http://a/"]}, "name a server twice"),
        ({"server_urls": ["http://a"], "device": "cuda"}, "is the servers' own: give it to `vllm serve` as a flag"),
        ({"server_urls": ["http://a"], "server_command": "vllm serve"}, "must have {model}"),
        ({"server_urls": ["http://a"], "server_command": "vllm serve {model} {size}"}, "must have {model}"),
        ({"server_urls": ["http://a"], "server_command": "vllm serve '{model}"}, "cannot be read"),
        ({"server_urls": ["http://a", "http://b"], "server_command": "serve {model}"}, r"must have {port} or {host}"),
        ({"server_urls": ["http://a"], "server_command": "serve {model} --api-key s"}, "holds an API key"),
        ({"kind": "vllm", "server_urls": ["http://a"]}, 'needs `kind = "vllm_server"`'),
    ],
)
def test_settings_that_do_not_fit_are_refused(write_recipe, settings: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told.replace("{", r"\{").replace("}", r"\}")):
        load_recipe(write_recipe(engine={"kind": "vllm_server", **settings}))


# A real server


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
def test_a_run_goes_on_when_its_server_is_killed(write_recipe, tmp_path: Path):
    """The server is started by the run, killed with all it has in hand, and started again."""
    sizes = {"head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": False}
    model = make_tiny_model(tmp_path / "model", **sizes)
    port, run = free_port(), RunFolder(tmp_path / "run")
    engine = {"kind": "vllm_server", "server_urls": [f"http://127.0.0.1:{port}"], "server_command": SERVE}
    recipe = write_recipe(engine=engine, model={"name_or_path": str(model)}, launch={"kind": "processes"})
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "oapl", "train", str(recipe), "--run_dir", str(run.path)]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    give_up, was_killed = time.monotonic() + 900, False
    while process.poll() is None:
        assert time.monotonic() < give_up
        if not was_killed and len(run.metrics()) >= 5 and (server := server_at(port)) is not None:
            os.kill(server, signal.SIGKILL)
            was_killed = True
        time.sleep(0.05)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert was_killed
    assert_complete(run, 12, 4)
    assert server_at(port) is None


def server_at(port: int) -> int | None:
    """The process that was started with this port."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(port).encode() in words and b"vllm.entrypoints.openai.api_server" in words and words[0] != b"sh":
            return int(path.parent.name)
    return None
