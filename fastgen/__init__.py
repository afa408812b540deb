"""fastgen: ``model.generate`` of Hugging Face transformers, faster, with the same results."""

from fastgen.helper import Result, generate
from fastgen.options import Options
from fastgen.patching import patch, status, unpatch
from fastgen.status import Status

__all__ = ["Options", "Result", "Status", "generate", "patch", "status", "unpatch"]
__version__ = "0.1.0"
