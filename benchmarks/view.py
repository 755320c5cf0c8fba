"""What `oapl view` costs on a run of 1,000,000 completions: first paint, index, filters, memory, weight of the page.

    make .venv/installed-dev
    .venv/bin/python benchmarks/view.py --output benchmarks/results/view.json

Makes the run folder through the store, as a sampler would but for fsync, unless it is there: 15,625 shards of 8 prompts
x 8 completions of random lengths, log-probs and rewards. Then serves it by
the command itself, asks as the page does, over HTTP, and opens the page in Chromium: with nothing indexed yet, while
the index is made, and once it is there. A file's first read is from the disk or from the system's cache, as it happens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from rich.console import Console
from rich.table import Table

import browser
from machine import write_results
from oapl.config import dump_recipe, load_recipe
from oapl.store import RunFolder
from oapl.types import Completion, FailedGroup, Group, PolicyRef, Round, SamplingParams, Shard, Verdict
from oapl.view.app import STATIC

RECIPE = Path(__file__).parents[1] / "recipes" / "countdown.toml"
STEPS_PER_ROUND = 50
PROMPTS_PER_STEP = 8
NUM_GENERATIONS = 8
LENGTH = 200
"""Tokens at which a completion is cut."""
RARE_TEXT = "a needle"
"""Stands in one completion of the oldest shard."""


# The run


def make_run(folder: Path, num_completions: int) -> None:
    """A run of so many completions, whose last round is half sampled and a quarter trained."""
    os.fsync = lambda _: None
    num_shards = num_completions // (PROMPTS_PER_STEP * NUM_GENERATIONS)
    num_rounds = -(-num_shards // STEPS_PER_ROUND)
    sizes = {
        "num_steps": num_rounds * STEPS_PER_ROUND,
        "weight_sync_steps": STEPS_PER_ROUND,
        "prompts_per_step": PROMPTS_PER_STEP,
    }
    sampling = {"num_generations": NUM_GENERATIONS, "max_completion_length": LENGTH}
    recipe = load_recipe(RECIPE, {"trainer": sizes, "sampling": sampling})
    run, rng = RunFolder(folder), np.random.default_rng(0)
    folder.mkdir(parents=True)
    run.config_path.write_text(dump_recipe(recipe))
    pool = "".join(f"{a}*{b}+{c}={a * b + c}\n" for a, b, c in rng.integers(1, 99, (40_000, 3)))
    for index in range(num_rounds):
        policy = PolicyRef(index, index * STEPS_PER_ROUND, f"{index:064x}")
        first = index * STEPS_PER_ROUND * PROMPTS_PER_STEP
        round = Round(
            index=index,
            policy=policy,
            sampling=SamplingParams(1.0, LENGTH, NUM_GENERATIONS),
            seed=index,
            prompt_ids=tuple(f"train/{first + i}" for i in range(STEPS_PER_ROUND * PROMPTS_PER_STEP)),
            prompts_per_shard=PROMPTS_PER_STEP,
            verifier="random/1",
        )
        run.round(index).open(round)
        left = min(STEPS_PER_ROUND, num_shards - index * STEPS_PER_ROUND)
        for number in range(left):
            groups = [
                make_group(rng, pool, position, round.prompt_ids[position]) for position in round.positions(number)
            ]
            failed: tuple[FailedGroup, ...] = ()
            if index == number == 0:
                groups[0] = replace(groups[0], texts=(RARE_TEXT, *groups[0].texts[1:]))
            if number == 7:
                failed = (FailedGroup(groups[-1].position, groups[-1].prompt_id, "no answer in 10 s", groups.pop()),)
            run.round(index).write_shard(round, number, Shard(tuple(groups), failed, 1.5, 0.25, 1e-5))
            step = index * STEPS_PER_ROUND + number + 1
            if index < num_rounds - 1 or number < left // 2:
                run.append_metrics(metrics_line(rng, step, index, num_shards))
        if left == STEPS_PER_ROUND:
            run.round(index).seal(round)
        if index % 20 == 0:
            print(f"round {index} of {num_rounds} is made", flush=True)


def make_group(rng: np.random.Generator, pool: str, position: int, prompt_id: str) -> Group:
    lengths = np.minimum(LENGTH, 10 + rng.exponential(50, NUM_GENERATIONS).astype(int))
    starts = rng.integers(0, len(pool) - 2 * LENGTH, NUM_GENERATIONS)
    rewards = rng.random(NUM_GENERATIONS) < 0.4
    completions = tuple(
        Completion(
            rng.integers(3, 40, length).astype(np.int32),
            -rng.exponential(scale, length).astype(np.float32),
            "length" if length == LENGTH else "stop",
        )
        for length, scale in zip(lengths.tolist(), rng.uniform(0.05, 1.0, NUM_GENERATIONS), strict=True)
    )
    return Group(
        position=position,
        prompt_id=prompt_id,
        prompt="use 3 5 7 9 make 24\n",
        prompt_ids=np.arange(3, 20, dtype=np.int32),
        completions=completions,
        texts=tuple(
            pool[start : start + 2 * length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ),
        verdicts=tuple(Verdict(float(reward), reason="equal" if reward else "not equal") for reward in rewards),
    )


def metrics_line(rng: np.random.Generator, step: int, index: int, num_steps: int) -> dict[str, Any]:
    reward, noise = 0.1 + 0.6 * step / num_steps, rng.normal(0, 0.05, 8)
    return {
        "step": step,
        "round": index,
        "epoch": 0,
        "lag": (step - 1) % STEPS_PER_ROUND,
        "time": 1.8e9 + step,
        "reward": reward + noise[0],
        "success": reward + noise[0],
        "uniform_share": 0.3 + noise[1],
        "num_completions": PROMPTS_PER_STEP * NUM_GENERATIONS,
        "num_tokens": 60 * PROMPTS_PER_STEP * NUM_GENERATIONS,
        "completion_length": 60 + 40 * noise[2],
        "truncated_share": 0.02,
        "surprise": 20 + noise[3],
        "hold": 2 + noise[3],
        "mismatch": 1e-5,
        "loss": 0.2 + noise[4],
        "log_ratio": noise[5],
        "log_ratio_right": abs(noise[5]),
        "log_ratio_wrong": -abs(noise[6]),
        "ratio_right": 1.0 + noise[5],
        "effective_share": 0.9,
        "token_gap": 1e-3,
        "entropy": 0.5 + noise[7],
        "residual": noise[1],
        "residual_std": 0.3,
        "r2": 0.1,
        "grad_norm": 1 + noise[2],
        "sampling_s": 1.5,
        "grading_s": 0.25,
        "wait_s": 0.5,
        "step_s": 1.0,
        "save_s": 0.01,
    }


# What is measured


class Server:
    """`oapl view` on the run, in a process of its own, asked as the page asks it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "oapl", "view", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", self.process.stdout.readline())
        assert match is not None
        self.url, self.port = match[0], int(match[1])

    def ask(self, name: str, **query: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/api/{name}?{urlencode(query)}")
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return dict(json.loads(data))

    def megabytes(self) -> float:
        """The most memory that it held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()


FILTERS: dict[str, dict[str, Any]] = {
    "newest": {},
    "wrong but likely": {"verdict": "wrong", "order": "likely"},
    "right but rare": {"verdict": "right", "order": "rare"},
    "truncated": {"finish": "length"},
    "failed grading": {"verdict": "failed"},
    "one prompt": {"prompt": "train/1000"},
    "rounds 10 to 20, highest reward": {"first_round": 10, "last_round": 20, "order": "best"},
    "newest, the page in the middle": {"offset": "middle"},
    "text that many have": {"text": "49*1"},
    "text that one has, one turn of the search": {"text": RARE_TEXT},
    "wrong ones with that text, one turn": {"text": RARE_TEXT, "verdict": "wrong"},
}


def measure_filters(server: Server, name: str, turns: int) -> dict[str, dict[str, float]]:
    found = {}
    for label, query in FILTERS.items():
        if query.get("offset") == "middle":
            query = {"offset": server.ask("completions", run=name)["total"] // 2}
        seconds = []
        for _ in range(turns):
            start = time.perf_counter()
            answer = server.ask("completions", run=name, **query)
            seconds.append(time.perf_counter() - start)
        found[label] = {"median_s": statistics.median(seconds), "most_s": max(seconds)}
        if "searched" in answer:
            found[label]["shards_read"] = answer["searched"]
    start = time.perf_counter()
    answer, cursor, num_turns = {"before": True}, {}, 0
    while answer["before"]:
        answer = server.ask("completions", run=name, text=RARE_TEXT, **cursor)
        num_turns += 1
        if answer["before"]:
            cursor = {"before_round": answer["before"][0], "before_shard": answer["before"][1]}
    assert len(answer["rows"]) == 1
    found["the same, turn after turn to the end"] = {"median_s": time.perf_counter() - start, "turns": num_turns}
    return found


CURVES = "document.querySelectorAll('.curve').length >= 10"
ROWS = "document.querySelectorAll('a.row').length > 0"


def paint(driver: Any, url: str, name: str) -> dict[str, float]:
    """Seconds from the navigation until the browser first painted, and until curves and then completions were there;
    bytes of all answers till then."""
    driver.get("about:blank")
    driver.get_log("performance")
    driver.get(f"{url}?{time.time()}#run?{urlencode({'run': name})}")
    script = f"""
        const done = arguments[arguments.length - 1];
        let curves = null;
        const look = () => {{
          if ({CURVES}) curves ??= performance.now() / 1e3;
          if (curves === null || !({ROWS})) return requestAnimationFrame(look);
          const first = performance.getEntriesByName("first-contentful-paint")[0].startTime / 1e3;
          requestAnimationFrame(() => setTimeout(() => done([first, curves, performance.now() / 1e3])));
        }};
        look();
    """
    first, curves, whole = driver.execute_async_script(script)
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    weight = sum(e["params"]["encodedDataLength"] for e in events if e["method"] == "Network.loadingFinished")
    return {"first_paint_s": first, "curves_s": curves, "ready_s": whole, "bytes": weight}


def measure(folder: Path, turns: int) -> dict[str, Any]:
    name, paints = folder.name, []
    driver = browser.open_chromium()
    driver.set_script_timeout(60)
    browser.set_window(driver, 1300, 900)
    try:
        for _ in range(turns):  # a server that knows nothing yet
            with serving(folder) as server:
                paints.append(paint(driver, server.url, name))
        with serving(folder) as server:
            start = time.perf_counter()
            server.ask("state", run=name)
            paint_during = paint(driver, server.url, name)
            during = []
            while True:
                begun = time.perf_counter()
                server.ask("completions", run=name, verdict="wrong", order="likely")
                during.append(time.perf_counter() - begun)
                index = server.ask("state", run=name, seen=0)["index"]
                if index["is_whole"] and index["num_read"] == index["num_sealed"]:
                    break
                time.sleep(0.5)
            index_s = time.perf_counter() - start
            after = [paint(driver, server.url, name) for _ in range(turns)]
            filters = measure_filters(server, name, turns)
            total = server.ask("completions", run=name)["total"]
            megabytes = server.megabytes()
    finally:
        driver.quit()
    return {
        "num_completions": total,
        "num_shards": index["num_sealed"],
        "first_visit": middle(paints),
        "while_indexing": {**paint_during, "filter_median_s": statistics.median(during), "filter_most_s": max(during)},
        "index_s": index_s,
        "later_visit": middle(after),
        "filters": filters,
        "megabytes": megabytes,
        "page_bytes": sum(path.stat().st_size for path in STATIC.iterdir()),
    }


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


def show(found: dict[str, Any]) -> None:
    table = Table("what", "value", title=f"{found['num_completions']:,} completions in {found['num_shards']:,} shards")
    for label, key in (("first visit", "first_visit"), ("while indexing", "while_indexing"), ("later", "later_visit")):
        each = found[key]
        table.add_row(f"{label}: first paint", f"{each['first_paint_s']:.2f} s")
        table.add_row(f"{label}: curves are there", f"{each['curves_s']:.2f} s")
        table.add_row(f"{label}: completions are there too", f"{each['ready_s']:.2f} s")
        table.add_row(f"{label}: fetched until then", f"{each['bytes'] / 1e3:.0f} kB")
    table.add_row("index is whole after", f"{found['index_s']:.1f} s")
    while_indexing = found["while_indexing"]
    table.add_row("wrong but likely, while indexing", f"{while_indexing['filter_median_s']:.2f} s")
    for label, each in found["filters"].items():
        more = f", {each['shards_read']:,} shards read" if "shards_read" in each else ""
        table.add_row(
            label, f"{each['median_s']:.2f} s{more}" + (f", {each['turns']} turns" if "turns" in each else "")
        )
    table.add_row("most memory of the server", f"{found['megabytes']:.0f} MB")
    table.add_row("the page's files", f"{found['page_bytes'] / 1e3:.0f} kB")
    Console().print(table)


# Pictures for docs/view.md


def take_pictures(folder: Path, place: Path) -> None:
    """Of a run of the shipped model that is trained meanwhile, and of a second one by other settings."""
    runs = folder / "pictures"
    shutil.rmtree(runs, ignore_errors=True)
    sizes = ("--trainer.weight_sync_steps", "20", "--evaluation.num_prompts", "16", "--evaluation.num_generations", "4")
    train = [sys.executable, "-m", "oapl", "train", str(RECIPE), *sizes]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    other = ["--trainer.num_steps", "60", "--loss.beta2", "0.3", "--run_dir", str(runs / "beta2_0.3")]
    subprocess.run([*train, *other], check=True, **quiet)
    live = subprocess.Popen([*train, "--trainer.num_steps", "400", "--run_dir", str(runs / "countdown")], **quiet)
    driver = browser.open_chromium()
    try:
        with serving(runs) as server:

            def look(state: str, ready: str, name: str, width: int = 1200, height: int = 800) -> None:
                browser.set_window(driver, width, height)
                driver.get("about:blank")
                driver.get(f"{server.url}{state}")
                end = time.monotonic() + 300
                while not driver.execute_script(f"return {ready}"):
                    assert time.monotonic() < end, ready
                    time.sleep(0.2)
                browser.take_picture(driver, place / f"view-{name}.png", whole=False)

            steps = "Number(document.querySelector('progress')?.value)"
            look("#run?run=countdown", f"{steps} > 50 && document.querySelector('.leases')", "run")
            rare = "#run?run=countdown&first_round=0&last_round=0&verdict=right&order=rare"
            look(rare, ROWS, "none")
            key = driver.execute_script("return document.querySelector('a.row').dataset.key")
            look(f"{rare}&open={key}", "document.querySelector('.scored')", "completion", height=700)
            look("#compare?a=countdown&b=beta2_0.3", "document.querySelector('.curve.run1')", "two")
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
            )
            look("#run?run=countdown", f"{ROWS} && document.querySelector('.curve')", "phone", 360, 740)
            (place / "view-none.png").unlink()
    finally:
        driver.quit()
        live.terminate()
        live.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/view"), help="where the run folder lies, or will")
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="take the pictures of docs/view.md into this folder, and end")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if (problem := browser.missing()) is not None:
        raise SystemExit(problem)
    if args.pictures:
        take_pictures(args.folder, args.pictures)
        return
    run = args.folder / f"of-{args.completions}"
    if not run.exists():
        make_run(run, args.completions)
    found = measure(run, args.turns)
    show(found)
    args.folder = None  # no result names a folder of one machine
    write_results(args, ("oapl", "duckdb", "starlette", "uvicorn", "pyarrow", "selenium"), **found)


if __name__ == "__main__":
    main()
