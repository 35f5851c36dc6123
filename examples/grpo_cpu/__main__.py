"""`python -m examples.grpo_cpu`: the whole example, one run for each seed, and the curve.

Invariant: the model a seed begins with is made once and kept; everything else is made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from pathlib import Path

from distaff.errors import DistaffError
from examples.grpo_cpu import curve
from examples.grpo_cpu.farm import ROOT, VLLM_PYTHON, PartEnded, Plan, play, torch_environment

CACHE = ROOT / ".cache" / "grpo_cpu"
USAGE_ERROR = 2


def start_model(seed: int, *, steps: int = 400) -> Path:
    """The model to begin with, made where it is not there yet: about a minute. Raises CalledProcessError."""
    recipe = (Path(__file__).with_name("tiny_model.py")).read_bytes()
    folder = CACHE / f"start-{hashlib.sha256(recipe).hexdigest()[:8]}-{steps}-{seed}"
    if not folder.exists():
        command = [str(VLLM_PYTHON), "-m", "examples.grpo_cpu.tiny_model", str(folder), "--seed", str(seed)]
        subprocess.run([*command, "--steps", str(steps)], check=True, cwd=ROOT, env=torch_environment())
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_cpu", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--ahead", type=int, default=12, help="groups played ahead of the trainer (0: none)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "grpo_cpu")
    parser.add_argument("--redis-url", default="")
    arguments = parser.parse_args()
    if not VLLM_PYTHON.exists():
        print("vLLM is not installed: make vllm-venv (about two minutes, 2.5 GB)", file=sys.stderr)
        return USAGE_ERROR
    try:
        return _learn(arguments)
    except (PartEnded, DistaffError, TimeoutError) as error:
        print(f"grpo_cpu: {error}", file=sys.stderr)
        return 1


def _learn(arguments: argparse.Namespace) -> int:
    logs = []
    for seed in arguments.seeds:
        began = time.monotonic()
        plan = Plan(
            folder=arguments.out,
            model=start_model(seed),
            steps=arguments.steps,
            ahead=arguments.ahead,
            learning_rate=arguments.learning_rate,
            seed=seed,
            redis_url=arguments.redis_url,
        )
        play(plan)
        print(f"seed {seed}: {curve.summary(plan.log)}, {time.monotonic() - began:.0f} s in all, {plan.log}")
        logs.append(plan.log)
    drawing = arguments.out / "curve.svg"
    drawing.write_text(curve.draw({f"seed {seed}": log for seed, log in zip(arguments.seeds, logs, strict=True)}))
    print(f"curve: {drawing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
