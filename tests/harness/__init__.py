"""What breaks the farm on purpose: servers that die, networks that fail, processes that are killed, seeds that repeat it."""
