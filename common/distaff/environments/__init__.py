"""verifiers environments behind one protocol. Producer (items) and worker (rollouts) both use it; never imported by `import distaff`."""
