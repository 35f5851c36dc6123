"""distaff, the rollout farm: what a trainer imports."""
