"""oapl: post-training of language models to reason, by off-policy reinforcement learning (arXiv 2602.19362)."""
