#!/usr/bin/env bash
# OAPL inside verl: L = 1600 / 32 = 50 optimizer steps to a sync. Rows and reward are verl's usual ones.
VERL_USE_EXTERNAL_MODULES=oapl.integrations.verl python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=oapl \
    +algorithm.beta1=5.0 \
    algorithm.use_kl_in_reward=False \
    actor_rollout_ref.actor.policy_loss._target_=oapl.integrations.verl.OAPLLossConfig \
    actor_rollout_ref.actor.policy_loss.loss_mode=oapl \
    +actor_rollout_ref.actor.policy_loss.beta2=0.1 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.entropy_coeff=0 \
    data.train_batch_size=1600 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_epochs=1 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.model.path=/models/my-model \
    data.train_files=train.parquet data.val_files=validation.parquet \
    reward.custom_reward_function.path=reward.py
