"""Environments that come with distaff: no network, small, deterministic by their arguments."""
