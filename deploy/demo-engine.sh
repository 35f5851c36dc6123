#!/bin/sh
# The demo engine's container: the model's tokenizer goes to /models/smollm2-135m for the workers, then the server starts.
set -eu
folder=$(python3 -c 'from pathlib import Path
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir
print(demo_tokenizer_dir(Path("/models")).name)')
ln -sfn "$folder" /models/smollm2-135m
exec python3 -m distaff_worker.demo_engine --host 0.0.0.0 --port 8080 --threads "${ENGINE_THREADS:-1}"
