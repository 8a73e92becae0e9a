"""From finished episodes to an update: PPO, GRPO, supervised learning and what they share."""
