"""The processes that the benchmarks start. Each speaks JSON lines: answers on standard output, orders on standard input."""
