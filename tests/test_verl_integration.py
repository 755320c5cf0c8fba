"""OAPL inside verl, where verl is installed: its pins of Transformers are not ours, so in an environment of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from oapl.losses import oapl_loss, optimal_value

pytest.importorskip("verl", reason="verl is not installed here")
pytestmark = pytest.mark.filterwarnings("ignore")  # verl's own


EXAMPLE = Path(__file__).parent.parent / "examples" / "verl_countdown.sh"


@pytest.fixture
def actor():
    """verl's own configuration, with the overrides of the example."""
    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass

    overrides = [word for word in EXAMPLE.read_text().split() if re.match(r"\+?[a-z_.]+=", word)]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides)
    return config.algorithm, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_the_registered_loss_and_value_are_those_of_oapl(actor):
    """A mini-batch of two groups, in micro-batches of one and three completions."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    from oapl.integrations.verl import OAPLLossConfig

    algorithm, config = actor
    assert algorithm.adv_estimator == config.policy_loss.loss_mode == "oapl"
    assert isinstance(config.policy_loss, OAPLLossConfig)
    torch.manual_seed(0)
    logprobs = (-3 * torch.rand(4, 6)).requires_grad_()
    sampler = -3 * torch.rand(4, 6)
    mask = torch.ones(4, 6)
    mask[1, 4:], mask[3, 1:] = 0, 0
    rewards = torch.zeros(4, 6)
    rewards[torch.arange(4), (mask.sum(-1) - 1).long()] = torch.tensor([1.0, 0.0, 0.5, 2.0])
    advantages, _ = get_adv_estimator_fn("oapl")(
        token_level_rewards=rewards, response_mask=mask, index=["a", "b", "a", "b"], config=algorithm
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=4, loss_scale_factor=None)
    total, residuals = torch.zeros(()), []
    for rows in (slice(0, 1), slice(1, 4)):
        loss, metrics = get_policy_loss_fn("oapl")(
            old_log_prob=sampler[rows],
            log_prob=logprobs[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            loss_agg_mode=config.loss_agg_mode,
            config=config,
        )
        total = total + loss
        residuals.append(metrics["actor/residual"])
    (gradient,) = torch.autograd.grad(total, logprobs)
    a, b = torch.tensor([1.0, 0.5]), torch.tensor([0.0, 2.0])
    wanted = torch.stack([a - optimal_value(a, 5.0), b - optimal_value(b, 5.0)], 1).flatten()
    expected, metrics = oapl_loss(logprobs, sampler, mask.bool(), wanted, beta2=0.1, num_completions=4)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    assert (residuals[0] + 3 * residuals[1]) / 4 == pytest.approx(float(metrics["residual"]), abs=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-6, atol=1e-6)


def test_without_beta2_the_loss_says_what_to_set(actor):
    from dataclasses import replace

    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import PolicyLossConfig

    import oapl.integrations.verl  # noqa: F401

    config = replace(actor[1], policy_loss=PolicyLossConfig(loss_mode="oapl"))
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"policy_loss\.beta2=0\.1"):
        get_policy_loss_fn("oapl")(x, x, x, x, config=config)
