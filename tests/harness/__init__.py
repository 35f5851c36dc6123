"""What fault tests stand on: servers, proxies, processes, seeds, the oracle, canaries."""
