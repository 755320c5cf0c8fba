"""Others' completions as rounds, and rounds as files for others: what comes back, and what is trained on."""

from __future__ import annotations

import json
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from conftest import write_recipe_file
from helpers import flip_a_bit
from oapl.batching import collate, group_rows, step_counts
from oapl.causal_lm import take_apart
from oapl.cli import main
from oapl.config import load_recipe, merge
from oapl.model import load_model, next_token_logprobs
from oapl.objective import make_objective
from oapl.store import RunFolder
from oapl.store.rounds import SCHEMA, round_from
from oapl.tasks.countdown import Countdown
from oapl.types import Group, PolicyRef, Shard, Verdict

EOS = 1
SMALL: dict[str, Any] = {
    "trainer": {"num_steps": 2, "weight_sync_steps": 2},
    "evaluation": {"num_prompts": 2, "num_generations": 2},
}


def write_small(path: Path, model: Path, /, **sections: dict[str, Any]) -> Path:
    return write_recipe_file(path, model, **merge(SMALL, sections))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunFolder:
    """A sealed round of 2 shards of 2 groups, whose rewards differ, with all that a verdict may say."""
    folder = tmp_path_factory.mktemp("recorded")
    run = RunFolder(folder / "run")
    assert main(["sample", str(write_small(folder / "r.toml", tiny_model)), "--run_dir", str(run.path)]) == 0
    source, round = run.round(0), run.round(0).load()
    shards = [source.read_shard(number) for number in range(round.num_shards)]
    shutil.rmtree(source.path)
    source.open(round)
    for number, shard in enumerate(shards):
        groups = tuple(Group.of(group.without_verdicts(), varied_verdicts(group)) for group in shard.groups)
        source.write_shard(round, number, replace(shard, groups=groups))
    source.seal(round)
    return run


def varied_verdicts(group: Group) -> list[Verdict]:
    return [
        Verdict(1.0, "3/4", "equal to 3/4", {"right": 1.0, "format": 0.0}),
        Verdict(0.25, None, "", {"right": 0.0, "format": 0.25}),
        Verdict(0.1, "x"),
        Verdict(-2.0 + group.position),
    ]


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    return lambda **sections: write_small(tmp_path / "recipe.toml", tiny_model, **sections)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "imported")


def bring(recipe: Path, run: RunFolder, *arguments: str | Path) -> int:
    return main(["import", str(recipe), *map(str, arguments), "--run_dir", str(run.path)])


def export(run: RunFolder, shape: str, output: Path) -> Path:
    assert main(["export", str(run.path), "--format", shape, "--output", str(output)]) == 0
    return output


def groups_of(run: RunFolder, index: int = 0) -> list[Group]:
    folder = run.round(index)
    return [group for number in range(folder.load().num_shards) for group in folder.read_shard(number).groups]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def content(group: Group) -> dict[str, Any]:
    values = dict(vars(group))
    values.pop("rewards", None)
    values.pop("all_rewards", None)
    values["prompt_ids"] = group.prompt_ids.tolist()
    values["completions"] = [
        (each.token_ids.tolist(), each.logprobs.tolist(), each.finish_reason) for each in group.completions
    ]
    return values


def problem(index: int) -> str:
    return str(Countdown().prompt("train", index).text)


# Round trips


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", ["chat", "trl", "verl", "oapl"])
def test_what_was_exported_comes_back_as_the_same_groups(
    recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path, shape: str, suffix: str
):
    file = export(recorded, shape, tmp_path / f"round.{suffix}")
    assert bring(recipe(), run, file) == 0
    assert list(map(content, groups_of(run))) == list(map(content, groups_of(recorded)))
    assert run.round(0).load().policy == recorded.round(0).load().policy
    assert run.round(0).load().verifier == recorded.round(0).load().verifier


def test_training_on_what_comes_back_is_training_on_the_round_itself(
    recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path
):
    """To the last bit; and in the folder of the import itself, it is the same again."""
    assert bring(recipe(), run, export(recorded, "chat", tmp_path / "round.jsonl")) == 0
    options = ["--evaluation.eval_on_start", "false", "--evaluation.num_prompts", "1"]
    weights = []
    for name, source in (("a", recorded.path), ("b", run.path)):
        command = ["train", str(recipe()), "--run_dir", str(tmp_path / name), "--launch.rounds_from", str(source)]
        assert main([*command, *options]) == 0
        weights.append(load_file(tmp_path / name / "policies/000001/model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rows_in_another_order_are_the_same_groups(recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path):
    rows = read_lines(export(recorded, "chat", tmp_path / "round.jsonl"))
    by_index = sorted(rows, key=lambda row: row["index"])
    assert bring(recipe(), run, write_lines(tmp_path / "mixed.jsonl", by_index)) == 0
    assert list(map(content, groups_of(run))) == list(map(content, groups_of(recorded)))


def test_pairs_are_best_against_worst_and_equal_groups_have_none(recorded: RunFolder, tmp_path: Path, tiny_model: Path):
    other = RunFolder(tmp_path / "other")
    shutil.copytree(recorded.path, other.path)
    folder, round = other.round(0), other.round(0).load()
    shard = folder.read_shard(1)
    equal = Group.of(shard.groups[0].without_verdicts(), [Verdict(1.0)] * 4)
    folder.set_shard_aside(1)
    folder.write_shard(round, 1, Shard((equal, shard.groups[1]), (), 0, 0, 0))
    folder.seal(round)
    pairs = read_lines(export(other, "pairs", tmp_path / "pairs.jsonl"))
    groups = [group for group in groups_of(recorded) if group.position != 2]
    assert [pair["prompt"] for pair in pairs] == [group.prompt for group in groups]
    ended = [each.finish_reason == "stop" for each in groups[2].completions]
    best = 3 if ended[3] and not ended[0] else 0  # of two that earned 1
    places = [(0, 3), (0, 3), (best, 2)]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        (group.texts[chosen], group.texts[rejected]) for group, (chosen, rejected) in zip(groups, places, strict=True)
    ]


# Others' files


def test_the_authors_rows_give_the_loss_of_their_formula(recipe, run: RunFolder, tmp_path: Path, tiny_model: Path):
    """Of texts alone, with one row of a group, or some, in the file: V^ is that of all its rewards."""
    beta1, beta2 = 0.5, 0.1
    answers = [
        [("1+2=3", 1.0), ("4*5=20", 0.0), ("9", 0.0)],  # three of four
        [("7-3=4", 1.0)],  # one of four
        [("8", 0.0), ("8/2=4", 1.0)],
        [("12", 0.25), ("6+6=12", 1.0), ("3", 0.0), ("1", 0.0)],  # all
    ]
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.25, 0.0]]
    rows = [
        {
            "data_source": "taco",
            "prompt": problem(place),
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": place},
            "response": text,
            "precomputed_reward": reward,
            "response_rewards": rewards[place],
        }
        for place, of_prompt in enumerate(answers)
        for text, reward in of_prompt
    ]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    path = recipe(loss={"beta1": beta1, "beta2": beta2}, sampling={"temperature": 0.7, "num_generations": 8})
    assert bring(path, run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    groups = groups_of(run)
    assert sum(len(group.completions) for group in groups) == len(rows)

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    anchor, policy = (load_model(str(tiny_model), "float32", "cpu") for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)

    def sum_of_logprobs(model: Any, prompt: str, response: str) -> float:
        before, after = tokenizer(prompt)["input_ids"], [*tokenizer(response)["input_ids"], EOS]
        ids = torch.tensor([[*before, *after]])
        with torch.no_grad():
            return float(next_token_logprobs(model, ids, 0.7, first=len(before) - 1).double().sum())

    def term(row: dict[str, Any]) -> float:
        value = beta1 * math.log(sum(math.exp(r / beta1) for r in row["response_rewards"]) / 4)
        ratio = sum_of_logprobs(policy, row["prompt"], row["response"]) - sum_of_logprobs(
            anchor, row["prompt"], row["response"]
        )
        return (beta2 * ratio - (row["precomputed_reward"] - value)) ** 2

    published = sum(map(term, rows)) / len(rows)
    objective = make_objective(load_recipe(path).loss)
    trained = group_rows(groups, objective)
    batch = collate(trained, "cpu", share_prompts=True)
    with torch.no_grad():
        logprobs, _ = take_apart(policy).logprobs(batch, 0.7)
        counts = step_counts(trained, 10)
        loss, _ = objective.loss(logprobs, batch.sampler_logprobs, batch.mask, batch.advantages, counts)
    assert published > 0.05
    assert loss.item() == pytest.approx(published, rel=1e-5)


def test_a_group_keeps_the_rewards_of_what_is_not_there(recipe, run: RunFolder, tmp_path: Path):
    """Also when it is exported again; a round without such groups has no column for them."""
    rows = [
        {"prompt": problem(i), "response": "1", "precomputed_reward": 1.0, "response_rewards": [0.0, 1.0, 0.5]}
        for i in range(4)
    ]
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    assert all(sorted(group.other_rewards) == [0.0, 0.5] for group in groups_of(run))
    assert main(["inspect", str(run.path)]) == 0
    assert pq.read_table(run.round(0).parquet_path(0)).column_names == [*SCHEMA.names, "other_rewards"]
    for shape in ("chat", "trl", "verl", "oapl"):
        again = RunFolder(tmp_path / shape)
        assert bring(recipe(), again, export(run, shape, tmp_path / f"{shape}.jsonl")) == 0
        assert list(map(content, groups_of(again))) == list(map(content, groups_of(run)))


def traces(texts: Sequence[Any] = ("1+2=3", "2", "3", "4")) -> list[dict[str, Any]]:
    """Four prompts, each with these completions, the first of which is right."""
    return [
        {"prompt": problem(place), "completion": text, "reward": float(number == 0)}
        for place in range(4)
        for number, text in enumerate(texts)
    ]


def test_log_probs_that_are_not_there_are_the_models_own(recipe, run: RunFolder, tmp_path: Path, tiny_model: Path):
    path = recipe(sampling={"temperature": 0.5})
    assert bring(path, run, write_lines(tmp_path / "rows.jsonl", traces())) == 0
    model = load_model(str(tiny_model), "float32", "cpu")
    for group in groups_of(run):
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_ids.tolist(), *completion.token_ids.tolist()]])
            with torch.no_grad():
                own = next_token_logprobs(model, ids, 0.5, first=len(group.prompt_ids) - 1)[0]
            assert completion.logprobs.tolist() == pytest.approx(own.tolist(), abs=1e-5)
    round = run.round(0).load()
    assert round.policy == run.policy(0)
    assert round.verifier == "imported from text"
    origin = json.loads((run.round(0).path / "imported.json").read_text())
    assert (origin["logprobs"], origin["num_sampled"]) == ("of the model", 0)


def test_names_that_mean_other_things_elsewhere_are_not_taken_for_the_stores(recipe, run: RunFolder, tmp_path: Path):
    """A completion's place in its group, an epoch, the gold answer: no `policy_digest` says they are an export's."""
    others = [{"position": i % 4, "round": i % 2, "answer": "gold", "reason": "gold"} for i in range(16)]
    rows = [{**row, **other} for row, other in zip(traces(), others, strict=True)]
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    assert [len(group.completions) for group in groups_of(run)] == [4] * 4
    assert json.loads((run.round(0).path / "imported.json").read_text())["num_sampled"] == 0
    verdicts = [verdict for group in groups_of(run) for verdict in group.verdicts]
    assert all((verdict.answer, verdict.reason) == (None, "") for verdict in verdicts)


def test_log_probs_of_unknown_tokens_are_no_anchor(recipe, run: RunFolder, tmp_path: Path):
    """Of as many tokens as the text has here, which may be others."""
    rows = [{**row, "logprobs": [-1.0] * len(row["completion"]), "finish_reason": "length"} for row in traces()]
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    assert json.loads((run.round(0).path / "imported.json").read_text())["logprobs"] == "of the model"
    assert run.round(0).load().policy == run.policy(0)


def test_the_end_token_stands_where_a_completion_ended_by_itself(recipe, run: RunFolder, tmp_path: Path):
    texts = ["1234567890", "123456789", "12", "5=", "3"]
    rows = traces(texts)
    for row in rows:
        if row["completion"] == "12":
            row["finish_reason"] = "length"  # whatever its length says
        if row["completion"] == "3":
            row["finish_reason"] = "stop"
    path = recipe(sampling={"stop": ["="], "num_generations": 5})
    assert bring(path, run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    found = [(each.token_ids.tolist()[-1] == EOS, each.finish_reason) for each in groups_of(run)[0].completions]
    assert found == [(False, "length"), (True, "stop"), (False, "length"), (False, "stop"), (True, "stop")]


def test_a_text_of_nearly_the_limits_tokens_was_cut(recipe, run: RunFolder, tmp_path: Path, capsys):
    """What was cut may have some tokens more or fewer as text: of a limit of 40, 5 % are 2."""
    path = recipe(sampling={"max_completion_length": 40})
    lengths = [37, 38, 39, 40, 41, 42]
    rows = traces(["1" * length for length in lengths])
    assert bring(path, run, write_lines(tmp_path / "rows.jsonl", rows)) == 0
    found = [(len(each.token_ids), each.finish_reason) for each in groups_of(run)[0].completions]
    assert found == [(37 + 1, "stop"), *((length, "length") for length in lengths[1:])]
    told = "20 of 24 completions have neither finish_reason nor token_ids, and have sampling.max_completion_length = 40"
    assert f"{told} tokens, give or take 2: taken as cut" in capsys.readouterr().out
    for more in ({"completion": "1" * 43}, {"token_ids": [3] * 41}):
        other = RunFolder(tmp_path / "other")
        assert bring(path, other, write_lines(tmp_path / "rows.jsonl", [*rows[:-1], {**rows[-1], **more}])) == 1
        assert "if it is that, leave the row's group out" in capsys.readouterr().err


def test_groups_are_completed_by_the_model_and_graded_by_the_task(
    recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path
):
    """What the same policy sampled keeps its log-probs to the last bit."""
    rows = read_lines(export(recorded, "chat", tmp_path / "round.jsonl"))
    kept = [row for row in rows if row["index"] < 1 + row["position"]]  # 1, 2, 3 and 4 of a group
    assert bring(recipe(), run, write_lines(tmp_path / "some.jsonl", kept)) == 0
    task = Countdown()
    for group, whole in zip(groups_of(run), groups_of(recorded), strict=True):
        assert len(group.completions) == 4
        count = 1 + group.position
        assert content(group)["completions"][:count] == content(whole)["completions"][:count]
        assert group.verdicts[:count] == whole.verdicts[:count]
        fresh = task.grade(task.prompt("train", group.position), group.texts[count:])
        assert list(group.verdicts[count:]) == fresh
    assert run.round(0).load().verifier == "countdown/1"
    assert json.loads((run.round(0).path / "imported.json").read_text())["num_sampled"] == 6


def test_groups_of_unequal_sizes_are_trained_on_and_shown(recipe, run: RunFolder, tmp_path: Path, capsys):
    """5, 3, 2 and 1 of 4: the large one stays whole, the lone one goes."""
    rows = [row for place in range(4) for row in traces(("1", "2", "3", "4", "5"))[5 * place :][: (5, 3, 2, 1)[place]]]
    rows += [{**row, "prompt": problem(7)} for row in rows[:2]]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    assert bring(recipe(), run, file, "--no_sampling") == 0
    assert "1 prompts have a single completion, and are left out" in capsys.readouterr().out
    assert [len(group.completions) for group in groups_of(run)] == [5, 3, 2, 2]
    other = tmp_path / "trained"
    command = ["train", str(recipe()), "--run_dir", str(other), "--launch.rounds_from", str(run.path)]
    assert main(command) == 0
    metrics = RunFolder(other).metrics()
    assert [record["num_completions"] for record in metrics] == [8, 4]
    assert [record["reward"] for record in metrics] == [pytest.approx(2 / 8), pytest.approx(2 / 4)]
    assert main(["inspect", str(other)]) == 0
    assert main(["report", str(other)]) == 0
    assert main(["train", str(recipe()), "--run_dir", str(run.path)]) == 0  # where it was imported
    trained = [load_file(folder / "policies/000001/model.safetensors") for folder in (other, run.path)]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_rounds_that_others_log_probs_anchor_cannot_be_anchored_anew(
    recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path, capsys
):
    rows = read_lines(export(recorded, "chat", tmp_path / "round.jsonl"))
    for row in rows:
        row["policy_digest"] = "f" * 64
    assert bring(recipe(), run, write_lines(tmp_path / "theirs.jsonl", rows)) == 0
    assert run.round(0).load().policy.digest == "f" * 64
    command = ["train", str(recipe(loss={"anchor": "trainer"})), "--launch.rounds_from", str(run.path)]
    assert main([*command, "--run_dir", str(tmp_path / "b")]) == 2
    assert "loss.anchor = 'trainer' needs the policy that sampled" in capsys.readouterr().err


def test_damage_to_an_imported_round_says_to_import_again(recipe, run: RunFolder, tmp_path: Path, capsys):
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", traces())) == 0
    flip_a_bit(run.round(0).parquet_path(1))
    assert main(["train", str(recipe()), "--run_dir", str(run.path)]) == 1
    assert "It was made of files: `oapl import` them again, into a new run_dir" in capsys.readouterr().err


def test_files_of_several_rounds_are_several_rounds(recipe, run: RunFolder, tmp_path: Path, capsys):
    rows = [{**row, "prompt": problem(place // 4)} for place, row in enumerate(traces() * 3)]
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", rows[:-8])) == 0
    assert run.round_indices() == [0, 1]
    out = capsys.readouterr().out
    assert "2 groups are left out, as they fill no round of 4" in out
    assert "2 rounds, and trainer.num_steps = 2 trains on 1: 4 steps train on all" in out


def test_each_round_keeps_the_policy_that_it_is_of(recorded: RunFolder, recipe, run: RunFolder, tmp_path: Path):
    """Where the model is to complete groups of a round that another policy sampled, all of it gets one anchor."""
    rows = read_lines(export(recorded, "chat", tmp_path / "round.jsonl"))
    other = {"policy_version": 1, "policy_digest": "e" * 64}
    later = [{**row, "round": 1, **other} for row in rows]
    fewer = [{**row, "round": 2, **other} for row in rows if row["index"] < 3]
    assert bring(recipe(), run, write_lines(tmp_path / "rows.jsonl", [*rows, *later, *fewer])) == 0
    refs = [run.round(index).load().policy for index in range(3)]
    assert refs == [recorded.round(0).load().policy, PolicyRef(1, 2, "e" * 64), run.policy(0)]
    assert [content(group) for group in groups_of(run, 1)] == [content(group) for group in groups_of(recorded)]
    for group, own in zip(groups_of(run, 2), groups_of(recorded), strict=True):
        assert len(group.completions) == 4
        for completion, before in zip(group.completions[:3], own.completions[:3], strict=True):
            assert completion.logprobs.tolist() == pytest.approx(before.logprobs.tolist(), abs=1e-5)
    origins = [json.loads((run.round(index).path / "imported.json").read_text()) for index in range(3)]
    assert [origin["logprobs"] for origin in origins] == ["of the files", "of the files", "of the model"]
    assert [origin["num_sampled"] for origin in origins] == [0, 0, 4]


CHAT = (
    "{% for message in messages %}<unk>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<pad>{% endif %}"
)
REWARD = """
def ends_with(prompts, completions, wanted, **columns):
    return [float(text.endswith(str(each))) for text, each in zip(completions, wanted)]
"""


@pytest.fixture
def chat_recipe(tmp_path: Path, tiny_model: Path, monkeypatch) -> Path:
    """Of rows of one's own, posed as messages to a model with a chat template."""
    model = tmp_path / "chat_model"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    (tmp_path / "rewards_of_rows.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("rewards_of_rows", None)
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": f"1+{i}=", "wanted": str(1 + i)} for i in range(8)])
    task = {
        "name": "dataset",
        "dataset": str(rows),
        "eval_dataset": str(rows),
        "reward_funcs": ["rewards_of_rows:ends_with"],
        "chat": True,
        "system_prompt": "2",
    }
    return write_small(tmp_path / "chat.toml", model, task=task)


def test_verls_prompts_are_found_among_the_tasks_problems(chat_recipe: Path, run: RunFolder, tmp_path: Path):
    """They were written without special tokens, and are given those again; the fourth completion is sampled."""
    rows = [
        {"input": f"21+{place}=", "output": str(answer), "gts": str(1 + place), "score": float(answer == 3), "step": 5}
        for place in (3, 2, 5, 0)
        for answer in (1, 2, 3)
    ]
    assert bring(chat_recipe, run, write_lines(tmp_path / "5.jsonl", rows)) == 0
    groups = groups_of(run)
    assert [group.prompt_id for group in groups] == ["train/3", "train/2", "train/5", "train/0"]
    assert [group.prompt for group in groups] == [f"<unk>2<unk>1+{place}=<pad>" for place in (3, 2, 5, 0)]
    assert all(len(group.completions) == 4 for group in groups)
    assert all(group.rewards[:3].tolist() == [0, 0, 1] for group in groups)


def test_prompts_go_out_as_messages_where_they_were_messages(chat_recipe: Path, run: RunFolder, tmp_path: Path):
    assert main(["sample", str(chat_recipe), "--run_dir", str(run.path)]) == 0
    first = groups_of(run)[0]
    index = int(first.prompt_id.removeprefix("train/"))
    messages = [{"role": "system", "content": "2"}, {"role": "user", "content": f"1+{index}="}]
    assert read_lines(export(run, "chat", tmp_path / "chat.jsonl"))[0]["messages"] == messages
    authors = read_lines(export(run, "oapl", tmp_path / "oapl.jsonl"))[0]
    assert authors["prompt"] == messages
    assert authors["response"] == first.texts[0]
    trl = pq.read_table(export(run, "trl", tmp_path / "trl.parquet")).to_pylist()[0]
    assert trl["prompt"] == messages
    assert trl["completion"] == [{"role": "assistant", "content": first.texts[0]}]
    assert read_lines(export(run, "verl", tmp_path / "verl.jsonl"))[0]["input"] == f"21+{index}="
    for name in ("chat.jsonl", "oapl.jsonl", "trl.parquet", "verl.jsonl"):
        again = RunFolder(tmp_path / f"again_{name}")
        assert bring(chat_recipe, again, tmp_path / name) == 0
        assert list(map(content, groups_of(again))) == list(map(content, groups_of(run)))


def test_an_assistants_last_message_is_the_completion(chat_recipe: Path, run: RunFolder, tmp_path: Path):
    rows = [
        {
            "messages": [{"role": "user", "content": f"{place}="}, {"role": "assistant", "content": str(answer)}],
            "reward": answer,
        }
        for place in range(4)
        for answer in range(4)
    ]
    assert bring(chat_recipe, run, write_lines(tmp_path / "traces.jsonl", rows)) == 0
    group = groups_of(run)[1]
    assert (group.prompt, group.texts, group.prompt_id) == ("<unk>1=<pad>", ("0", "1", "2", "3"), "imported/1")


def test_what_a_model_wrote_outside_of_content_is_not_dropped(
    chat_recipe: Path, run: RunFolder, tmp_path: Path, capsys
):
    """As vLLM answers with a reasoning parser. Empty fields say nothing, and by its tokens a completion is whole."""
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2+2=4", "tool_calls": [], "refusal": None}
    rows = [
        {"prompt": [{"role": "user", "content": f"{place}="}], "completion": [answer], "reward": number}
        for place in range(4)
        for number in range(4)
    ]
    last = [{"messages": [*row["prompt"], answer], "reward": row["reward"]} for row in rows]
    for name, found in (("completion", rows), ("messages", last)):
        assert bring(chat_recipe, run, write_lines(tmp_path / "traces.jsonl", found)) == 1
        message = (
            f"line 1: the message in `{name}` has, besides its `content`, reasoning_content, which the model wrote"
        )
        assert message in capsys.readouterr().err
        whole = RunFolder(tmp_path / name)
        file = write_lines(tmp_path / "tokens.jsonl", [{**row, "token_ids": [3, 4, EOS]} for row in found])
        assert bring(chat_recipe, whole, file) == 0
        assert groups_of(whole)[0].completions[0].token_ids.tolist() == [3, 4, EOS]


# TRL's own


@pytest.fixture(scope="module")
def trl_tables(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The completions that a real GRPOTrainer logs: two steps of two prompts, two reward functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of TRL are not ours
        pytest.importorskip("trl", minversion="1.16")
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        def length(completions: list[str], **columns: Any) -> list[float]:
            return [len(text) / 10 for text in completions]

        def has_equals(completions: list[str], **columns: Any) -> list[float | None]:
            return [float("=" in text) if len(text) > 1 else None for text in completions]

        folder = tmp_path_factory.mktemp("trl")
        arguments = GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=10,
            max_steps=2,
            logging_steps=1,
            log_completions=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(tiny_model).train(),
            [length, has_equals],
            arguments,
            Dataset.from_dict({"prompt": [problem(i) for i in range(4)]}),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
        )
        trainer.train()
        return folder / "completions"


def test_the_tables_that_trl_logs_become_a_round(trl_tables: Path, recipe, run: RunFolder, capsys):
    files = sorted(trl_tables.glob("completions_*.parquet"))
    assert len(files) == 2
    path = recipe(sampling={"num_generations": 4})
    assert bring(path, run, *files, "--reward", "length=2", "--reward", "has_equals") == 0
    assert "reward = 1 x has_equals + 2 x length" in capsys.readouterr().out
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    groups = groups_of(run)
    assert len(groups) == 4
    assert [group.prompt for group in groups] == [row["prompt"] for row in rows[::4]]
    for group, number in zip(groups, range(0, 16, 4), strict=True):
        for text, verdict, row in zip(group.texts, group.verdicts, rows[number : number + 4], strict=True):
            assert text == row["completion"]  # pandas writes the None of a reward function as null
            assert verdict.reward == pytest.approx(2 * row["length"] + (row["has_equals"] or 0.0), abs=1e-6)


def test_a_batch_that_trl_logs_at_several_steps_counts_once(trl_tables: Path, recipe, run: RunFolder, tmp_path, capsys):
    """As with `num_iterations` = 2: step 3 trains on what was sampled for step 2."""
    files = sorted(trl_tables.glob("completions_*.parquet"))
    table = pq.read_table(files[1])
    again = table.set_column(table.column_names.index("step"), "step", [[3] * 8])
    pq.write_table(again, tmp_path / "completions_00003.parquet")
    assert bring(recipe(), run, *files, tmp_path / "completions_00003.parquet") == 0
    assert "1 steps repeat the completions of the step before, and are left out" in capsys.readouterr().out
    assert run.round_indices() == [0]
    assert [len(group.completions) for group in groups_of(run)] == [4] * 4


def test_a_reward_function_of_trls_that_is_called_reward_is_one_of_the_sum(recipe, run: RunFolder, tmp_path, capsys):
    rows = [
        {"step": 1, "prompt": row["prompt"], "completion": row["completion"], "reward": row["reward"], "format": 0.5}
        for row in traces()
    ]
    file = write_lines(tmp_path / "rows.jsonl", [{**row, "advantage": 0.0} for row in rows])
    assert bring(recipe(), run, file) == 0
    assert "reward = 1 x format + 1 x reward" in capsys.readouterr().out
    assert all(group.rewards.tolist() == [1.5, 0.5, 0.5, 0.5] for group in groups_of(run))


def test_the_tables_of_a_trl_run_that_evaluates_give_each_completion_once(recipe, run: RunFolder, tmp_path, capsys):
    """Its table is of the last 16 completions: those of a batch, which three evaluations of 8 push out."""
    trained = [(problem(place), str(answer)) for place in range(4) for answer in range(4)]
    evaluated = [
        [(problem(place), f"{number}{answer}") for place in (8, 9) for answer in range(4)] for number in range(3)
    ]
    tables = [trained, trained[8:] + evaluated[0], evaluated[0] + evaluated[1], evaluated[1] + evaluated[2]]
    files = [
        write_lines(
            tmp_path / f"completions_{step:05}.jsonl",
            [
                {"step": step, "prompt": prompt, "completion": text, "right": float(text == "1"), "advantage": 0.0}
                for prompt, text in table
            ],
        )
        for step, table in enumerate(tables, start=1)
    ]
    assert bring(recipe(), run, *files, "--trainer.prompts_per_step", "5") == 0
    out = capsys.readouterr().out
    assert "3 steps begin with completions of the step before, each of which is taken once" in out
    assert [group.prompt for group in groups_of(run)] == [problem(place) for place in (0, 1, 2, 3, 8, 9, 8, 9, 8, 9)]
    texts = [("0", "1", "2", "3")] * 4 + [tuple(f"{i}{j}" for j in range(4)) for i in (0, 0, 1, 1, 2, 2)]
    assert [group.texts for group in groups_of(run)] == texts
    other = RunFolder(tmp_path / "other")
    assert bring(recipe(), other, files[3]) == 1  # alone it hides which is whose
    error = capsys.readouterr().err
    assert f"({files[3]}, line 1) has 8 completions in one step, more than sampling.num_generations = 4" in error


def test_what_tokens_do_not_carry_is_told(chat_recipe: Path, run: RunFolder, tmp_path: Path, capsys):
    rows = [
        {"input": f"{place}=", "output": text, "gts": None, "score": 1.0, "step": 5}
        for place in range(4)
        for text in ("1", "x", "<eos>", "2")
    ]
    file = write_lines(tmp_path / "5.jsonl", rows)
    assert bring(chat_recipe, run, file) == 0
    out = capsys.readouterr().out
    assert f"8 of 16 completions read otherwise once they are tokens of this model, the first at {file}, line 2" in out
    assert "4 prompts are none of the task's and were written without their special tokens, if they had some" in out
    assert [each.token_ids.tolist() for each in groups_of(run)[0].completions] == [[8, EOS], [2, EOS], [EOS], [9, EOS]]


# What cannot be read


def bad(**changes: Any) -> list[dict[str, Any]]:
    rows = traces()
    rows[5] = {name: value for name, value in {**rows[5], **changes}.items() if value is not ...}
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (bad(reward=math.nan), "line 6: `reward` is nan, which is no finite reward"),
        (bad(reward="1"), "line 6: `reward` must be a number, not '1'"),
        (bad(completion=""), "line 6: the completion is empty"),
        (bad(completion=...), "line 6: there is no `completion`, and the last message is not an assistant's"),
        (bad(prompt=7), "line 6: `prompt` must be text or chat messages"),
        (bad(completion="1" * 11), "line 6: the completion has 11 tokens, more than sampling.max_completion_length"),
        (bad(token_ids=[3, 99]), "line 6: 99 is no token of"),
        (bad(token_ids=[3, 4], logprobs=[-1.0]), "line 6: 2 `token_ids` and 1 `logprobs`"),
        (bad(token_ids=[3], logprobs=[0.5]), "line 6: `logprobs` must be natural logs of probabilities"),
        (bad(temperature=0.6), "line 6: sampled at temperature 0.6, the recipe has sampling.temperature = 1.0"),
        (bad(finish_reason="abort"), "line 6: `finish_reason` must be `stop` or `length`, not 'abort'"),
        ([{"question": "a", "answer": "b"}], "has the columns question, answer, and no format that is known here"),
        ([{"prompt": "a", "response": "b", "precomputed_reward": 1}], "Nearest is the authors' rows, which lacks resp"),
        ([{"prompt": "1", "response": "2", "precomputed_reward": 1, "response_rewards": [0]}], "is none of its"),
        (
            [{"prompt": "1", "response": "2", "precomputed_reward": 1, "response_rewards": [0, 1]}] * 2,
            "line 2: more rows of this prompt earned 1 than its `response_rewards`",
        ),
        (
            [{**row, "policy_digest": "f" * 64, "round": 0, "position": 0} for row in traces()],
            "line 5 and FILE, line 1 are both of round 0, position 0, and have other prompts",
        ),
        (traces()[:4], "the files hold 1 groups, fewer than a round of the recipe has: 4"),
        (traces()[:-1], "1 prompts have fewer than sampling.num_generations = 4 completions, and are none of the task"),
        ([{"step": 1, "prompt": "1", "completion": "2", "advantage": 0.0}], "has no column of rewards"),
        ([], "has no rows"),
    ],
)
def test_a_file_that_will_not_do_says_where_and_why(recipe, run: RunFolder, tmp_path: Path, capsys, rows, message):
    file = write_lines(tmp_path / "rows.jsonl", rows)
    assert bring(recipe(), run, file) == 1
    assert message.replace("FILE", str(file)) in capsys.readouterr().err
    assert not run.path.exists()


def test_files_that_are_none_are_refused(recipe, run: RunFolder, tmp_path: Path, capsys):
    cases = {
        "a.csv": "must end in .parquet or .jsonl",
        "b.jsonl": "line 1 is no JSON",
        "c.parquet": "is no Parquet file",
    }
    for name, message in cases.items():
        (tmp_path / name).write_text("no rows\n")
        assert bring(recipe(), run, tmp_path / name) == 1
        assert message in capsys.readouterr().err
    assert bring(recipe(), run, tmp_path / "missing.jsonl") == 1
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_files_of_several_formats_and_a_second_import_are_refused(recipe, run: RunFolder, tmp_path: Path, capsys):
    file = write_lines(tmp_path / "a.jsonl", traces())
    other = write_lines(tmp_path / "b.jsonl", [{"input": "1", "output": "2", "score": 1, "step": 1}])
    assert bring(recipe(), run, file, other) == 1
    assert "the files have different formats" in capsys.readouterr().err
    assert bring(recipe(), run, file, file) == 1
    assert "a file is given twice" in capsys.readouterr().err
    assert bring(recipe(), run, file, "--reward", "x") == 1
    assert "--reward names columns of TRL's table" in capsys.readouterr().err
    assert bring(recipe(), run, file) == 0
    assert bring(recipe(), run, file) == 2
    assert "has rounds already" in capsys.readouterr().err
    assert round_from(run.round(0).path / "round.json").num_prompts == 4
