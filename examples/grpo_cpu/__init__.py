"""A loop that learns, on two cores: a tiny model, the real vLLM, a farm, and a policy-gradient trainer that reads its stream."""
